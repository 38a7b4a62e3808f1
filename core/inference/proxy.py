"""The token in front of a server whose own key does not cover every dangerous route.

Owns which routes may be asked, by whom, and with which bodies: everything else is refused before the server hears of
it. The server itself listens on loopback, or on a unix socket, and nobody else is told where.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
from aiohttp import web

from core.rpc.auth import bearer_ok
from core.rpc.service import bound_socket

MAX_BODY = 256 << 20
_HOP = frozenset({"host", "authorization", "connection", "transfer-encoding", "content-length", "keep-alive"})

BodyCheck = Callable[[dict[str, Any]], None]


class RefusedError(Exception):
    """A body that must not reach the server; its message is the answer."""


class Proxy:
    """`routes`: (method, path) to a check of its JSON body, or None. `key`: what the server itself wants, if anything.

    A check may block on files: it runs in a thread.
    """

    def __init__(
        self,
        target: str,
        token: str,
        routes: Mapping[tuple[str, str], BodyCheck | None],
        *,
        deadline: float,
        unix_socket: str | None = None,
        key: str | None = None,
    ) -> None:
        self._target = target.rstrip("/")
        self._token = token
        self._routes = routes
        self._deadline = deadline
        self._socket = unix_socket
        self._key = key
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Binds, serves, and returns the URL; port 0 takes a free one."""
        limits = aiohttp.ClientTimeout(total=self._deadline, sock_connect=30)
        connector = aiohttp.UnixConnector(self._socket, limit=0) if self._socket else aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=limits, auto_decompress=False)
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._answer)
        listener = bound_socket(host, port)
        # a client that goes away cancels its handler, and with it the request to the server
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path != "/health" and not bearer_ok(request.headers, self._token):
            return _refusal(401, "the run's token is missing or wrong")
        route = (request.method, request.path)
        if route not in self._routes:
            return _refusal(403, f"{request.method} {request.path} is not among what a run asks of its servers")
        body = await request.read()
        check = self._routes[route]
        if check is not None:
            try:
                value = json.loads(body or b"{}")
                if not isinstance(value, dict):
                    raise RefusedError("the body must be a JSON object")
                await asyncio.to_thread(check, value)
            except (ValueError, RefusedError) as error:
                return _refusal(400, str(error))
        return await self._forward(request, body)

    async def _forward(self, request: web.Request, body: bytes) -> web.StreamResponse:
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        reply = None
        try:
            async with self._session.request(
                request.method, self._target + request.path_qs, data=body or None, headers=headers
            ) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOP}
                reply = web.StreamResponse(status=answer.status, headers=kept)
                if answer.content_length is not None:
                    reply.content_length = answer.content_length
                await reply.prepare(request)
                async for block in answer.content.iter_any():
                    await reply.write(block)
                await reply.write_eof()
                return reply
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            if reply is not None and reply.prepared:
                raise  # the connection breaks off: the client must not take half an answer for a whole one
            return _refusal(502, f"the server does not answer: {error or type(error).__name__}")


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
