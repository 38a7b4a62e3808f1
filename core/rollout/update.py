"""New weights onto the servers: fetch once a node, then swap; served versions never mix.

Owns the order of these steps, one update at a time, newest version first. Membership is the pool's; files are the
daemons' (POST /fetch verifies them before any server is told). Requests in flight stay on their server through it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.rollout.pool import ServerPool
from core.rollout.servers import Server, ServerState
from core.rollout.swap import swap

Fetch = Callable[[str, "Published"], Awaitable[str]]
Release = Callable[[str, str], Awaitable[None]]

_REMEMBERED_SYNCS = 50
_RETRY_SECS = 1.0


class FetchRefusedError(Exception):
    """A node did not get a version: files missing, torn or not what the servers hold."""


@dataclass(frozen=True)
class Published:
    """A version that the trainer wrote."""

    version: int
    generation: int
    name: str
    path: str
    digest: str
    step: int
    optimizer_done: float
    received: float = field(default_factory=time.monotonic)

    @staticmethod
    def from_json(body: dict[str, Any]) -> Published:
        return Published(
            int(body["version"]),
            int(body["generation"]),
            str(body["name"]),
            str(body["path"]),
            str(body["digest"]),
            int(body["step"]),
            float(body["optimizer_done"]),
        )


class WeightUpdates:
    """`fetch(daemon, version)` gives the verified directory on that node; `release(daemon, name)` lets it go."""

    def __init__(
        self,
        pool: ServerPool,
        fetch: Fetch,
        release: Release,
        *,
        rolling_share: float | None = None,
        fetched: Callable[[Exception | None], None] = lambda error: None,
        after_round: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool = pool
        self._fetch = fetch
        self._release = release
        self._rolling_share = rolling_share
        self._fetched = fetched
        self._after_round = after_round
        self._wanted: Published | None = None
        self._current: Published | None = None
        self._holds = 0
        self._synced: str | None = None
        self._on_node: dict[str, set[str]] = {}
        self._progress = asyncio.Condition()
        self.syncs: deque[dict[str, Any]] = deque(maxlen=_REMEMBERED_SYNCS)

    def publish(self, version: Published) -> None:
        self._wanted = version
        self._pool.changed.set()

    @property
    def wanted(self) -> Published | None:
        return self._wanted

    @property
    def current(self) -> Published | None:
        """What servers are on or are being brought to."""
        return self._current

    def served_version(self) -> int:
        served = self._pool.served()
        if served is not None:
            return served
        return self._current.version if self._current is not None else 0

    def names_in_use(self) -> set[str]:
        names = {version.name for version in (self._wanted, self._current) if version is not None}
        return names | {server.served_name for server in self._pool.servers.values() if server.served_name is not None}

    async def hold(self) -> None:
        """Waits until what is published so far is served, then defers loads until release_hold."""
        target = self._wanted
        async with self._progress:
            await self._progress.wait_for(lambda: target is None or self._holds > 0 or self._caught_up_with(target))
            self._holds += 1

    def _caught_up_with(self, target: Published) -> bool:
        """It is served, or a newer one is."""
        current = self._current
        return current is not None and current.received >= target.received and self._is_served(current)

    def release_hold(self) -> None:
        self._holds -= 1
        self._pool.changed.set()

    async def run(self) -> None:
        """Until cancelled: brings every server that is not on the newest version to it."""
        while True:
            self._pool.changed.clear()
            worked = await self._round()
            self._after_round()
            async with self._progress:
                self._progress.notify_all()
            if not worked:
                await self._pool.changed.wait()

    async def _round(self) -> bool:
        target = self._current if self._holds > 0 and self._current is not None else self._wanted
        if target is None:
            return False
        behind = [
            server
            for server in self._pool.servers.values()
            if server.state is ServerState.STARTING
            or (server.state is ServerState.SERVING and server.served_name != target.name)
        ]
        if not behind:
            return False
        self._current = target
        try:
            await self._update(target, behind)
        except FetchRefusedError as error:
            print(f"version {target.name} was refused: {error}", file=sys.stderr, flush=True)
            self._fetched(error)
            await asyncio.sleep(_RETRY_SECS)
        return True

    async def _update(self, target: Published, servers: list[Server]) -> None:
        began = time.monotonic()
        paths = await self._fetch_on_nodes(target, servers)
        fetch_secs = time.monotonic() - began
        self._fetched(None)
        timings = [
            await swap(self._pool, some, name=target.name, version=target.version, paths=paths)
            for some in self._portions(servers)
        ]
        if target.name != self._synced and self._is_served(target):
            self._synced = target.name
            secs = time.time() - target.optimizer_done
            self.syncs.append(
                {
                    "version": target.version,
                    "secs": round(secs, 4),
                    "fetch": round(fetch_secs, 4),
                    "load": round(max(timing.load for timing in timings), 4),
                    "pause": round(max(timing.pause for timing in timings), 4),
                }
            )
        await self._release_old(target)

    async def _fetch_on_nodes(self, target: Published, servers: Sequence[Server]) -> dict[str, str]:
        """Where each daemon has the version now. A server is loaded only when all of its nodes have it, at one path."""
        daemons = sorted({daemon for server in servers for daemon in server.daemons})
        results = await asyncio.gather(*(self._fetch(daemon, target) for daemon in daemons), return_exceptions=True)
        paths: dict[str, str] = {}
        refusals = []
        for daemon, result in zip(daemons, results, strict=True):
            if isinstance(result, BaseException):
                refusals.append(f"{daemon}: {result}")
            else:
                paths[daemon] = result
                self._on_node.setdefault(daemon, set()).add(target.name)
        lacking = [_lacking(server, paths, refusals) for server in servers]
        if all(lacking):
            raise FetchRefusedError(lacking[0])
        for server in list(self._pool.servers.values()):
            asked = server.state is not ServerState.OUT and set(server.daemons) <= set(daemons)
            if asked and (why := _lacking(server, paths, refusals)):
                self._pool.take_out(server, f"its node did not get {target.name}: {why}")
        return paths

    def _portions(self, servers: list[Server]) -> list[list[Server]]:
        """All at once, or, rolling, a share of those in rotation at a time (those that start cost no one a pause)."""
        starting = [server for server in servers if server.state is ServerState.STARTING]
        serving = [server for server in servers if server.state is ServerState.SERVING]
        if self._rolling_share is None:
            return [servers]
        size = max(1, int(self._rolling_share * len(self._pool.in_rotation())))
        portions = [serving[i : i + size] for i in range(0, len(serving), size)]
        return [starting, *portions] if starting else portions

    def _is_served(self, target: Published) -> bool:
        rotation = self._pool.in_rotation()
        return bool(rotation) and all(server.served_name == target.name for server in rotation)

    async def _release_old(self, target: Published) -> None:
        in_use = self.names_in_use()
        for daemon, names in self._on_node.items():
            for name in sorted(names - in_use - {target.name}):
                names.discard(name)
                try:
                    await self._release(daemon, name)
                except Exception as error:
                    print(f"{daemon} did not let go of {name}: {error}", file=sys.stderr, flush=True)


def _lacking(server: Server, paths: Mapping[str, str], refusals: Sequence[str]) -> str:
    """Why a server cannot be loaded: a node of it has nothing, or has it elsewhere than the first one's."""
    if any(daemon not in paths for daemon in server.daemons):
        return "; ".join(refusals)
    found = {paths[daemon] for daemon in server.daemons}
    return f"its nodes have it at different paths: {', '.join(sorted(found))}" if len(found) > 1 else ""
