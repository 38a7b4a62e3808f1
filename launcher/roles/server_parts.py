"""The parts of a server over several nodes, seen from one of their processes: meeting, following, ending together.

Owns the conversation with the daemon of this node; what follows from what it says is launcher.node.meeting's.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from core.inference.child import ServerChild
from core.inference.commands import Launch, Seat
from core.inference.ports import take_block
from core.rpc.client import AsyncClient
from core.rpc.errors import RpcError
from launcher.node import guard
from launcher.node.meeting import Act, Meeting, PartReport, broken, next_act
from launcher.node.specs import CANNOT_GO_ON
from launcher.planning.layout import Server

POLL_SECS = 0.25


class BrokenError(Exception):
    """A part has ended or was given up, so the head of its server ends, too."""

    def __init__(self, part: PartReport) -> None:
        super().__init__(f"part {part.part} of {part.server} ({part.name}) is {part.state}: {part.why}")
        # one that was given up comes back with no other start
        self.status = CANNOT_GO_ON if part.state == "out" else 1


class Notices:
    """What the registry says of one server over several nodes, and what this process says there of its part."""

    def __init__(self, daemon: str, token: str, server: Server) -> None:
        self._client = AsyncClient(daemon, token)
        self._server = server
        self.start = ""
        """The head's: of the start that it announced last."""

    async def close(self) -> None:
        await self._client.close()

    async def announce(self, start: str, host: str, port: int) -> None:
        self.start = start
        body = {"name": self._server.process, "start": start, "host": host, "port": port}
        await self._client.post("/meeting", body, request_id=start)

    async def report(self, start: str, state: str, why: str = "") -> None:
        body = {"name": self._server.process, "start": start, "state": state, "why": why}
        await self._client.post("/part", body, request_id=f"{start}-{state}")

    async def look(self) -> tuple[Meeting | None, list[PartReport]]:
        found = await self._client.get("/registry")
        rows = [row for row in found["parts"] if row["server"] == self._server.name]
        parts = [PartReport(*(row[key] for key in ("name", "server", "part", "start", "state", "why"))) for row in rows]
        return Meeting.of(found["meetings"].get(self._server.name)), parts

    async def absent(self) -> str:
        """Of the head: words for the parts that are not with its start, to go behind what it says itself."""
        try:
            _, parts = await self.look()
        except RpcError:
            return ""
        away = [each for each in parts if each.start != self.start or each.state != "up"]
        return "".join(f"; {each.name} is not with it ({each.why or each.state})" for each in away)

    async def until_broken(self) -> PartReport:
        """Of the head: returns when a part of its start has ended, or will not start any more."""
        while True:
            try:
                found = broken(self.start, (await self.look())[1])
            except RpcError as error:
                print(f"the registry does not answer: {error}", file=sys.stderr, flush=True)
                found = None
            if found is not None:
                return found
            await asyncio.sleep(POLL_SECS)


async def follow(
    notices: Notices,
    me: str,
    seat: Seat,
    build: Callable[[Seat], Launch],
    *,
    log: Path,
    patience: float,
    stop: Awaitable[object],
) -> int:
    """A part that is no head, until `stop`: its process lives and ends with the head's starts.

    1 when there is no start to take part in for `patience` seconds.
    """
    guard.become_subreaper()
    part = _Part(notices, seat, build, log)
    _, parts = await notices.look()
    before = next((each for each in parts if each.name == me), None)
    if before is not None and before.start:
        part.joined = before.start
        if before.state == "up":  # said by a process of ours that is gone, so late that nobody said it is
            await notices.report(before.start, "down", "its process started again")
    stopping = asyncio.ensure_future(stop)
    try:
        while not stopping.done():
            try:
                await part.step()
            except RpcError as error:
                print(f"the registry does not answer: {error}", file=sys.stderr, flush=True)
            if part.idle_secs() > patience:
                said = f"no start of the server to take part in for {patience:g} s (rollout.setup_timeout)"
                print(f"NotReadyError: {said}; its part 0 is another process", file=sys.stderr, flush=True)
                return 1
            await asyncio.wait([stopping], timeout=POLL_SECS)
        return 0
    finally:
        await part.end()


class _Part:
    def __init__(self, notices: Notices, seat: Seat, build: Callable[[Seat], Launch], log: Path) -> None:
        self._notices = notices
        self._seat = seat
        self._build = build
        self._log = log
        self._child: ServerChild | None = None
        self._block = take_block()
        self._idle_since = time.monotonic()
        self.joined = ""

    def idle_secs(self) -> float:
        return 0.0 if self._child is not None else time.monotonic() - self._idle_since

    async def step(self) -> None:
        process = self._child.process if self._child is not None else None
        if process is not None and process.returncode is not None:
            why = f"its process ended with status {process.returncode}"
            print(f"{why}; the head starts again", file=sys.stderr, flush=True)
            await self._leave()
            await self._notices.report(self.joined, "down", why)
        meeting, _ = await self._notices.look()
        act = next_act(meeting, self.joined, self._child is not None)
        if act is Act.END:
            print(f"start {self.joined} of the head is over", file=sys.stderr, flush=True)
            await self._leave()
            await self._notices.report(self.joined, "down", "the head has ended")
        elif act is Act.START:
            assert meeting is not None
            await self._join(meeting)

    async def end(self) -> None:
        await self._leave()
        self._block.close()

    async def _join(self, meeting: Meeting) -> None:
        await self._notices.report(meeting.start, "up")  # before: what dies from here on is seen
        self.joined = meeting.start
        print(f"takes part in start {meeting.start}, met at {meeting.host}:{meeting.port}", flush=True)
        self._child = ServerChild(self._log)
        seat = replace(
            self._seat,
            port=self._block.first,
            served_name=f"policy-{meeting.start}",
            directory=str(self._child.directory),
            head=meeting.host,
            head_port=meeting.port,
        )
        await self._child.start(self._build(seat))

    async def _leave(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            self._idle_since = time.monotonic()
            await child.stop()
            guard.signal_descendants(
                signal.SIGKILL
            )  # what outlived it: the daemon's guard waits for this process to end
            guard.reap()
