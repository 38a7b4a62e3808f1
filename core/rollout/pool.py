"""The servers of a run: who is in rotation, which one gets a request, who is taken out and comes back.

Owns membership. Versions are brought to them by rollout.update, requests are made by rollout.workflow. A server is
taken out when its daemon says so, when it does not answer, and when nothing comes from it for `server_deadline` seconds
while requests wait on it; it comes back through STARTING, which ends with the current version loaded and verified.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from core.inference.client import Generation, Images, InferenceClient, Request, ServerLostError, ServerRefusedError
from core.rollout.servers import OVERBOOKED, Server, ServerState

Registry = Callable[[], Awaitable[dict[str, Any]]]
MakeClient = Callable[[dict[str, Any]], InferenceClient]  # from a server's row of the registry
Restart = Callable[[Server], Awaitable[None]]

_POLL_SECS = 0.5
_PROBE_SECS = 5.0
_LOST_PAUSE_SECS = 0.2
_REFUSALS = 8
_FLAPS = 5
_FLAP_SECS = 30.0


class ServerPool:
    def __init__(
        self,
        registry: Registry,
        make_client: MakeClient,
        restart: Restart,
        *,
        server_deadline: float,
        pause_deadline: float = 120.0,
        load_deadline: float = 600.0,
        poll_secs: float = _POLL_SECS,
    ) -> None:
        self._registry = registry
        self._make_client = make_client
        self._restart = restart
        self._deadline = server_deadline
        self.pause_deadline = pause_deadline
        self.load_deadline = load_deadline
        self._poll_secs = poll_secs
        self.servers: dict[str, Server] = {}
        self.changed = asyncio.Event()
        self.left_out: dict[str, str] = {}
        self.losses = 0
        self._flaps: dict[str, int] = {}
        self._barred: dict[str, float] = {}
        self._returning: set[str] = set()
        self._retired: set[InferenceClient] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._background: set[asyncio.Task] = set()
        self._none_since = time.monotonic()
        self._busy_of_the_gone = 0.0

    def in_rotation(self) -> list[Server]:
        return [server for server in self.servers.values() if server.in_rotation]

    def served(self) -> int | None:
        """The lowest version that every server in rotation answers with; None while there is none."""
        versions = [server.served for server in self.in_rotation() if server.served is not None]
        return min(versions) if versions else None

    def busy_secs(self) -> float:
        return self._busy_of_the_gone + sum(server.busy_secs() for server in self.servers.values())

    def idle(self) -> bool:
        """Some server could work and has nothing to do."""
        return any(server.state is ServerState.SERVING and not server.tasks for server in self.servers.values())

    def none_for_secs(self) -> float:
        """For how long no server has been in rotation."""
        return 0.0 if self.in_rotation() else time.monotonic() - self._none_since

    def most_requests(self) -> int | None:
        """How many the servers in rotation take together; None where one of them does not say."""
        found = [server.capacity for server in self.in_rotation()]
        known = [capacity for capacity in found if capacity is not None]
        return OVERBOOKED * sum(known) if len(known) == len(found) else None

    async def acquire(self, preferred: str | None = None) -> Server:
        """A serving server with room: the preferred one (a group's samples share a prefix), else the least loaded.

        Waits for one; whoever gets it must send its request at once.
        """
        while True:
            open_ = [each for each in self.servers.values() if each.state is ServerState.SERVING and each.has_room]
            if open_:
                by_name = {server.name: server for server in open_}
                return by_name.get(preferred or "") or min(open_, key=lambda server: (server.groups, server.running))
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._let_in(1)  # it was this one's turn
                raise

    def _let_in(self, count: int) -> None:
        while count and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                count -= 1

    def announce_serving(self) -> None:
        self._let_in(len(self._waiting))
        self.changed.set()

    async def lost(self, server: Server, error: Exception) -> None:
        """A request broke off: out, unless the server still answers (one broken connection is no dead server)."""
        if server.state is ServerState.OUT:
            return
        try:
            await asyncio.wait_for(server.client.model_info(), _PROBE_SECS)
        except (ServerLostError, ServerRefusedError, TimeoutError):
            self.take_out(server, f"does not answer: {error}")
        else:
            await asyncio.sleep(_LOST_PAUSE_SECS)

    def refused(self, server: Server, error: Exception) -> None:
        """It answered with an error of its own (out of memory, say). Again and again, it is out: an idle server that
        refuses everything would be given everything."""
        server.refusals += 1
        if server.refusals >= _REFUSALS:
            self.take_out(server, f"refused {server.refusals} requests in a row: {error}", restart=True)

    def take_out(self, server: Server, reason: str, *, restart: bool = False) -> None:
        """`restart`: this start of the process is not trusted again; its daemon is asked for a new one."""
        if server.state is ServerState.OUT:
            return
        print(f"server {server.name} ({server.url}) is out: {reason}", file=sys.stderr, flush=True)
        if len(self.in_rotation()) == 1 and server.in_rotation:
            self._none_since = time.monotonic()
        server.move(ServerState.OUT, reason)
        self.losses += 1
        lived = time.monotonic() - server.created
        self._flaps[server.name] = self._flaps.get(server.name, 0) + 1 if lived < _FLAP_SECS else 0
        if self._flaps[server.name] > _FLAPS:
            times = f"out {_FLAPS + 1} times in a row within {_FLAP_SECS:g} s of coming in"
            self.left_out[server.name] = f"left out: {times}, last: {reason}"
        elif restart:
            self._barred[server.name] = server.started
            self._spawn(self._restart(server))
        self.changed.set()

    async def watch(self) -> None:
        """Until cancelled: follows the registry, judges silence."""
        while True:
            try:
                listed = {row["name"]: row for row in (await self._registry()).get("servers", [])}
            except Exception as error:
                print(f"the registry does not answer: {error}", file=sys.stderr, flush=True)
                listed = None
            if listed is not None:
                self._follow(listed)
            for server in list(self.servers.values()):
                if server.state is ServerState.SERVING and server.silent_secs() > self._deadline:
                    self.take_out(server, f"no token for {self._deadline:g} s while requests wait on it", restart=True)
                elif server.state is ServerState.SERVING and self._idle_too_long(server):
                    server.progressed()
                    self._spawn(self._probe(server))
            await asyncio.sleep(self._poll_secs)

    async def close(self) -> None:
        for task in list(self._background):
            task.cancel()
        clients = {server.client for server in self.servers.values()} | self._retired
        await asyncio.gather(*(client.close() for client in clients), return_exceptions=True)

    def status(self) -> dict[str, Any]:
        return {
            server.name: {
                "url": server.url,
                "state": str(server.state),
                "version": server.served,
                "running": server.running,
                "capacity": server.capacity,
                "state_secs": round(time.monotonic() - server.moved, 1),
                "silent_secs": round(server.silent_secs(), 1),
                "busy_secs": round(server.busy_secs(), 3),
                "reason": self.left_out.get(server.name, server.reason),
            }
            for server in self.servers.values()
        }

    def _follow(self, listed: dict[str, dict[str, Any]]) -> None:
        for name, server in self.servers.items():
            row = listed.get(name)
            if row is None or row.get("state") == "down":
                self.take_out(server, "its daemon reports it down" if row else "its daemon no longer lists it")
            elif row["started"] != server.started or row["url"] != server.url:
                self.take_out(server, "it was started anew")
        for name, row in listed.items():
            if row.get("state") == "up" and name not in self.left_out and self._barred.get(name) != row["started"]:
                self._take_in(name, row)

    def _take_in(self, name: str, row: dict[str, Any]) -> None:
        known = self.servers.get(name)
        if known is None:
            self._add(name, row)
        elif known.state is ServerState.OUT and known.started != row["started"]:
            self._replace(known, row)
        elif known.state is ServerState.OUT and name not in self._returning:
            self._returning.add(name)
            self._spawn(self._return(known, row))

    def _add(self, name: str, row: dict[str, Any]) -> None:
        client = self._make_client(row)
        daemons = tuple(row.get("daemons") or ())
        self.servers[name] = Server(
            name, row["url"], row["daemon"], row["started"], client, daemons, left=lambda: self._let_in(1)
        )
        self.changed.set()

    def _replace(self, known: Server, row: dict[str, Any]) -> None:
        self._busy_of_the_gone += known.busy_secs()
        self._retired.add(known.client)
        self._spawn(self._retire(known.client))
        self._add(known.name, row)

    async def _retire(self, client: InferenceClient) -> None:
        await client.close()
        self._retired.discard(client)

    async def _return(self, known: Server, row: dict[str, Any]) -> None:
        """The same process as before, said to be up: it must answer before it is taken in again, and answer in time."""
        try:
            await asyncio.wait_for(known.client.model_info(), _PROBE_SECS)
        except (ServerLostError, ServerRefusedError, TimeoutError):
            if time.monotonic() - known.moved > self._deadline:
                self._barred[known.name] = known.started
                self._spawn(self._restart(known))
            return
        finally:
            self._returning.discard(known.name)
        if self.servers.get(known.name) is known:
            self._replace(known, row)

    def _idle_too_long(self, server: Server) -> bool:
        return not server.tasks and time.monotonic() - server.last_progress > self._deadline

    async def _probe(self, server: Server) -> None:
        """One token with a deadline: an idle server's /health says 200 long after it is dead."""
        request = Request(f"probe-{server.name}-{time.time_ns()}", [0], Images(), {"max_new_tokens": 1})
        try:
            await asyncio.wait_for(server.generate(request, stream=False, partial=Generation()), self._deadline)
        except (ServerLostError, ServerRefusedError, TimeoutError) as error:
            if server.state is ServerState.SERVING:
                self.take_out(server, f"gave no token when idle: {error or 'deadline'}", restart=True)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
