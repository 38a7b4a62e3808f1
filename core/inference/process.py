"""The life of one vLLM or SGLang process behind its proxy: started, found ready, ended.

Owns ports, the nonce in the served name, readiness and the retry where a port was taken after all. What the process is
started with is core.inference.commands', restarts after a death are the node daemon's.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from core.inference.backends import CLIENTS
from core.inference.belongings import ServerDirectory, segments, unlink
from core.inference.client import Generation, Images, Request, ServerLostError, ServerRefusedError
from core.inference.commands import Launch, Seat
from core.inference.exposure import WeightsDirectory, routes
from core.inference.ports import PortBlock, take_block
from core.inference.proxy import Proxy

PORT_TRIES = 4
_POLL_SECS = 0.25
_END_SECS = 12.0
_TAKEN = ("address already in use", "EADDRINUSE", "Errno 98")
_DROPPED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")


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
    host: str = "127.0.0.1"
    ready_secs: float = 300.0
    request_secs: float = 3600.0


class ServerProcess:
    """`build` gives the command for a seat; the output goes to `log` (None: this process's own)."""

    def __init__(self, wanted: Wanted, build: Callable[[Seat], Launch], *, log: Path | None = None) -> None:
        self._wanted = wanted
        self._build = build
        self._log = log
        self._block: PortBlock | None = None
        self._proxy: Proxy | None = None
        self._directory: ServerDirectory | None = None
        self._segments: set[str] = set()
        self.process: asyncio.subprocess.Process | None = None
        self.url = ""

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
        """TERM, then KILL; whatever it has started beyond that is the guard's."""
        if self._proxy is not None:
            await self._proxy.stop()
            self._proxy = None
        if self.process is not None and self.process.returncode is None:
            self._segments |= await asyncio.to_thread(segments, self.process.pid)
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.process.wait(), _END_SECS)
            except TimeoutError:
                with suppress(ProcessLookupError):
                    self.process.kill()
                await self.process.wait()
        unlink(self._segments)
        self._segments = set()
        if self._block is not None:
            self._block.close()
        if self._directory is not None:
            self._directory.remove()
            self._directory = None

    async def _start_on(self, block: PortBlock) -> str:
        wanted = self._wanted
        self._directory = ServerDirectory()
        seat = self._seat(block)
        launch = self._build(seat)
        before = self._log.stat().st_size if self._log and self._log.exists() else 0
        output = self._log.open("ab") if self._log else None
        try:
            self.process = await asyncio.create_subprocess_exec(
                *launch.argv,
                env=environment({**launch.env, "TMPDIR": str(self._directory.path)}),
                stdout=output,
                stderr=output,
            )
        finally:
            if output is not None:
                output.close()
        target = f"http://127.0.0.1:{seat.port}"
        weights = WeightsDirectory(Path(seat.model), wanted.weights_root)
        self._proxy = Proxy(
            target,
            wanted.token,
            routes(wanted.backend, weights),
            deadline=wanted.request_secs,
            unix_socket=seat.socket,
        )
        self.url = await self._proxy.start(wanted.host)
        await self._until_ready(seat, before)
        self._segments = await asyncio.to_thread(segments, self.process.pid)
        return self.url

    def _seat(self, block: PortBlock) -> Seat:
        assert self._directory is not None
        one_node_vllm = self._wanted.backend == "vllm" and self._wanted.seat.nodes == 1
        socket = str(self._directory.path / "http.sock") if one_node_vllm else None
        fields = vars(self._wanted.seat)
        name = f"policy-{secrets.token_hex(8)}"
        return Seat(**{**fields, "port": block.first, "served_name": name, "socket": socket})

    async def _until_ready(self, seat: Seat, before: int) -> None:
        deadline = time.monotonic() + self._wanted.ready_secs
        while not await self._is(seat.served_name):
            self._refuse_dead(before)
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

    def _refuse_dead(self, before: int) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            return
        said = ""
        if self._log is not None:
            said = self._log.read_bytes()[before:][-3000:].decode("utf-8", "replace")
        raise NotReadyError(f"ended with status {self.process.returncode} before it was ready\n{said}".strip())


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """This process's, without what would lead another Python to our packages, with the server's on top."""
    kept = {key: value for key, value in os.environ.items() if key not in _DROPPED}
    # it is below TMPDIR otherwise, which is the server's own and goes with it
    compiled = {"TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}")}
    return compiled | kept | dict(own)
