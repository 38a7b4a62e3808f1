"""The life of one vLLM or SGLang process behind its proxy: started, found ready, ended.

Owns ports, the nonce in the served name, readiness and the retry where a port was taken after all. What the process is
started with is core.inference.commands', restarts after a death are the node daemon's.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from core.inference.backends import CLIENTS
from core.inference.child import ServerChild
from core.inference.client import Generation, Images, Request, ServerLostError, ServerRefusedError
from core.inference.commands import Launch, Seat
from core.inference.exposure import WeightsDirectory, routes
from core.inference.ports import PortBlock, take_block
from core.inference.proxy import Proxy

PORT_TRIES = 4
MEETING = 1
"""Which port of its block the parts of a server over several nodes meet at."""
_POLL_SECS = 0.25
_TAKEN = ("address already in use", "EADDRINUSE", "Errno 98")

Announce = Callable[[str, str, int], Awaitable[None]]
"""Of a start: its id, the head's interface, the port there."""


class NotReadyError(Exception):
    """The server ended, or gave no token in time; the message says which, and where its log is."""


@dataclass(frozen=True)
class Wanted:
    """One server: what it serves, from where it may load, and how long it may take to its first token."""

    backend: str
    seat: Seat
    """Its port, name and socket are chosen here."""
    weights_root: Path | None
    token: str
    links: Path | None = None
    """Of a server over several nodes: only versions by their links there are loaded."""
    ready_secs: float = 300.0
    request_secs: float = 3600.0


class ServerProcess:
    """`build` gives the command for a seat; the output goes to `log` (None: this process's own)."""

    def __init__(
        self,
        wanted: Wanted,
        build: Callable[[Seat], Launch],
        *,
        log: Path | None = None,
        announce: Announce | None = None,
    ) -> None:
        """`announce`: told of every start of a server over several nodes, before it is made."""
        self._wanted = wanted
        self._build = build
        self._log = log
        self._announce = announce
        self._block: PortBlock | None = None
        self._proxy: Proxy | None = None
        self._child: ServerChild | None = None
        self.url = ""

    @property
    def process(self) -> asyncio.subprocess.Process | None:
        return self._child.process if self._child is not None else None

    async def start(self) -> str:
        """The proxy's URL, once the server has sampled a token under the name that only this start knows."""
        failed: set[int] = set()
        for _ in range(PORT_TRIES):
            self._block = take_block(frozenset(failed))
            try:
                return await self._start_on(self._block)
            except NotReadyError as error:
                await self.stop()
                if not any(word in str(error) for word in _TAKEN):
                    raise
                failed.add(self._block.first)
        raise NotReadyError(f"{PORT_TRIES} blocks of ports were taken while the server started")

    async def stop(self) -> None:
        """Proxy, process, ports: in this order."""
        if self._proxy is not None:
            await self._proxy.stop()
            self._proxy = None
        if self._child is not None:
            await self._child.stop()
            self._child = None
        if self._block is not None:
            self._block.close()

    async def _start_on(self, block: PortBlock) -> str:
        wanted = self._wanted
        child = self._child = ServerChild(self._log)
        start = secrets.token_hex(8)
        socket = str(child.directory / "http.sock") if wanted.backend == "vllm" else None
        seat = replace(
            wanted.seat,
            port=block.first,
            served_name=f"policy-{start}",
            socket=socket,
            directory=str(child.directory),
        )
        if self._announce is not None:
            seat = replace(seat, head=seat.host, head_port=block.first + MEETING)
            await self._announce(start, seat.head, seat.head_port)
        await child.start(self._build(seat))
        weights = WeightsDirectory(Path(seat.model), wanted.weights_root, wanted.links)
        self._proxy = Proxy(
            f"http://127.0.0.1:{seat.port}",
            wanted.token,
            routes(wanted.backend, weights),
            deadline=wanted.request_secs,
            unix_socket=seat.socket,
        )
        self.url = await self._proxy.start(wanted.seat.host)
        await self._until_ready(seat, child)
        await child.note_segments()
        return self.url

    async def _until_ready(self, seat: Seat, child: ServerChild) -> None:
        deadline = time.monotonic() + self._wanted.ready_secs
        while not await self._is(seat.served_name):
            if child.process is not None and child.process.returncode is not None:
                status = child.process.returncode
                raise NotReadyError(f"ended with status {status} before it was ready\n{child.said()}".strip())
            if time.monotonic() > deadline:
                raise NotReadyError(f"not ready within {self._wanted.ready_secs:g} s (rollout.setup_timeout)")
            await asyncio.sleep(_POLL_SECS)
        client = CLIENTS[self._wanted.backend](self.url, self._wanted.token)
        request = Request(secrets.token_hex(8), [0], Images(), {"max_new_tokens": 1, "ignore_eos": True})
        try:
            left = max(1.0, deadline - time.monotonic())
            answer = await asyncio.wait_for(client.generate_ids(request, stream=False, partial=Generation()), left)
        except (ServerLostError, ServerRefusedError, TimeoutError) as error:
            raise NotReadyError(f"answers, but gives no token: {error or 'deadline'}") from error
        finally:
            await client.close()
        if len(answer.output_ids) != 1:
            raise NotReadyError(f"asked for one token, got {answer.output_ids}")

    async def _is(self, name: str) -> bool:
        """It answers, and it is this start of the server, not somebody else's on the same port."""
        headers = {"Authorization": f"Bearer {self._wanted.token}"}
        limit = aiohttp.ClientTimeout(total=10)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit, headers=headers) as session,
                session.get(f"{self.url}/v1/models") as reply,
            ):
                models = (await reply.json()).get("data", []) if reply.status == 200 else []
        except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError):
            return False
        if models and models[0].get("id") != name:
            raise NotReadyError(f"another server ({models[0].get('id')}) answers there: address already in use")
        return bool(models)
