"""One inference server as the pool sees it: its state, its version, what runs on it.

Owns the state machine (one table of legal moves) and the counts of one server; who moves it is the pool (in and out of
rotation) and the weight update (paused, loading).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from core.inference.client import Generation, InferenceClient, Request, ServerLostError


class ServerState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    PAUSED = "paused"
    LOADING = "loading"
    OUT = "out"


MOVES: dict[ServerState, frozenset[ServerState]] = {
    ServerState.STARTING: frozenset({ServerState.PAUSED, ServerState.OUT}),
    ServerState.SERVING: frozenset({ServerState.PAUSED, ServerState.OUT}),
    ServerState.PAUSED: frozenset({ServerState.LOADING, ServerState.OUT}),
    ServerState.LOADING: frozenset({ServerState.SERVING, ServerState.OUT}),
    ServerState.OUT: frozenset(),  # the pool starts over with a new Server
}
OVERBOOKED = 2  # so many times what a server runs at once is given to it: as many wait there as run
IN_ROTATION = frozenset({ServerState.SERVING, ServerState.PAUSED, ServerState.LOADING})


class IllegalMoveError(Exception):
    """A server was told to go where its state does not lead."""


@dataclass(eq=False)
class Server:
    """`started` tells one start of the server process from the next; `served` is None until a load was verified."""

    name: str
    url: str
    daemon: str
    started: float
    client: InferenceClient
    daemons: tuple[str, ...] = ()
    """Of every node that holds a part of it; `daemon` is the first's."""
    state: ServerState = ServerState.STARTING
    served: int | None = None
    served_name: str | None = None
    reason: str = ""
    groups: int = 0
    capacity: int | None = None
    """Requests that it runs at once, as it says itself; None where it does not say."""
    left: Callable[[], None] = lambda: None
    """Called when a request is done with it."""
    tasks: set[asyncio.Task] = field(default_factory=set)
    created: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)
    last_progress: float = field(default_factory=time.monotonic)
    refusals: int = 0  # in a row, by errors of its own
    busy_since: float | None = None
    _busy_secs: float = 0.0
    _cut: set[asyncio.Task] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.daemons = self.daemons or (self.daemon,)

    def move(self, to: ServerState, reason: str = "") -> None:
        if to not in MOVES[self.state]:
            raise IllegalMoveError(f"server {self.name} cannot go from {self.state} to {to}")
        self.state = to
        self.reason = reason
        self.moved = self.last_progress = time.monotonic()
        if to is ServerState.OUT:
            self.served = self.served_name = None
            self._cut |= self.tasks
            for task in self.tasks:
                task.cancel()

    @property
    def in_rotation(self) -> bool:
        return self.state in IN_ROTATION and self.served is not None

    @property
    def running(self) -> int:
        return len(self.tasks)

    @property
    def has_room(self) -> bool:
        return self.capacity is None or self.running < OVERBOOKED * self.capacity

    def busy_secs(self) -> float:
        """Seconds with at least one request on it."""
        return self._busy_secs + (time.monotonic() - self.busy_since if self.busy_since is not None else 0.0)

    def silent_secs(self) -> float:
        """Seconds without any sign of progress while requests wait on it; 0 while it has none."""
        if self.busy_since is None:
            return 0.0
        return time.monotonic() - max(self.last_progress, self.busy_since)

    async def generate(self, request: Request, *, stream: bool, partial: Generation) -> Generation:
        """Raises ServerLostError, too, when the server is moved out meanwhile; `partial` then holds what arrived."""
        task = asyncio.current_task()
        assert task is not None
        self._enter(task)
        try:
            return await self.client.generate_ids(request, stream=stream, partial=partial, progress=self.progressed)
        except asyncio.CancelledError:
            if task in self._cut and task.uncancel() == 0:
                raise ServerLostError(f"{self.url}: taken out of rotation: {self.reason}") from None
            raise
        finally:
            self._leave(task)

    def progressed(self) -> None:
        self.last_progress = time.monotonic()

    def _enter(self, task: asyncio.Task) -> None:
        if not self.tasks:
            self.busy_since = time.monotonic()
        self.tasks.add(task)

    def _leave(self, task: asyncio.Task) -> None:
        self.tasks.discard(task)
        self._cut.discard(task)
        if not self.tasks and self.busy_since is not None:
            self._busy_secs += time.monotonic() - self.busy_since
            self.busy_since = None
        self.left()
