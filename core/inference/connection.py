"""HTTP to one inference server: one session, deadlines, failures in the words of core.inference.client.

Owns transport only; what is sent and what an answer means is the backends' (core.inference.sglang and .vllm).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from core.inference.client import ServerLostError, ServerRefusedError

_JSON = {"Content-Type": "application/json"}
_BROKEN = (aiohttp.ClientError, ConnectionError, TimeoutError, json.JSONDecodeError)


class Connection:
    """Belongs to the event loop that first uses it."""

    def __init__(self, url: str, token: str | None, *, timeout: float) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, timeout: float) -> dict[str, Any]:
        return await self._call("GET", path, None, timeout)

    async def post(self, path: str, body: dict[str, Any] | None, *, timeout: float) -> dict[str, Any]:
        """The answer's object; an empty one where the server answers with something else."""
        return await self._call("POST", path, body, timeout)

    @asynccontextmanager
    async def answer(self, path: str, data: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        """A generation, while it is read. A broken connection, or a server that cannot now, is ServerLostError."""
        try:
            async with self._open().post(self.url + path, data=data, headers=_JSON) as reply:
                if reply.status in (502, 503):
                    raise ServerLostError(f"{self.url}: {reason(reply.status, await reply.read())}")
                if reply.status != 200:
                    raise ServerRefusedError(reason(reply.status, await reply.read()), reply.status)
                yield reply
        except _BROKEN as error:
            raise ServerLostError(f"{self.url}: {error or type(error).__name__}") from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=self._timeout, sock_connect=30),
                read_bufsize=1 << 20,
            )
        return self._session

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=30)
        try:
            async with self._open().request(method, self.url + path, json=body, timeout=limit) as reply:
                data = await reply.read()
        except _BROKEN as error:
            raise ServerLostError(f"{self.url}{path}: {error or type(error).__name__}") from None
        if reply.status != 200:
            raise ServerRefusedError(f"{path}: {reason(reply.status, data)}", reply.status)
        try:
            return json.loads(data) if data.strip().startswith(b"{") else {}
        except ValueError as error:
            raise ServerLostError(f"{self.url}{path}: answered what is not JSON") from error


async def events(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The objects of a server-sent event stream, until [DONE]. A chunk is a whole line, whatever its length."""
    pending = b""
    async for block in reply.content.iter_any():
        pending += block
        *lines, pending = pending.split(b"\n")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)


def reason(status: int, data: bytes) -> str:
    """Status and message of a refusal, however the server wraps it."""
    try:
        value = json.loads(data)
        for key in ("error", "message", "detail"):
            value = value.get(key, value) if isinstance(value, dict) else value
        text = value
    except ValueError:
        text = data[:500].decode("utf-8", "replace")
    return f"HTTP {status}: {text}"
