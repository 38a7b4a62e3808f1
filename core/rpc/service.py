"""An HTTP service of a run: token on every route but /health, bounded bodies, request ids, /health /status /metrics.

Owns transport only: what a route answers is its handler's business; streaming protocols use aiohttp directly.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from core.rpc.auth import REQUEST_ID, bearer_ok
from core.rpc.errors import PortTakenError, RpcError

Reply = dict | bytes
REMEMBERED_ANSWERS = 1024


@dataclass(frozen=True)
class Call:
    """One request as a handler sees it."""

    path: Mapping[str, str]
    query: Mapping[str, str]
    body: bytes = b""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def json(self) -> dict[str, Any]:
        try:
            value = json.loads(self.body or b"{}")
        except ValueError as error:
            raise RpcError(400, f"body is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise RpcError(400, f"body must be a JSON object, got {type(value).__name__}")
        return value


Handler = Callable[[Call], Awaitable[Reply]]


class Answers:
    """Answers of `once` routes by (route, request id): a repeated request gets the recorded or the running answer."""

    def __init__(self, limit: int = REMEMBERED_ANSWERS) -> None:
        self.limit = limit
        self.tasks: OrderedDict[tuple[str, str], tuple[bytes, asyncio.Task[Reply]]] = OrderedDict()

    async def get(self, route: str, call: Call, handler: Handler) -> Reply:
        key = (route, call.request_id)
        digest = hashlib.sha256(call.body).digest()
        if key not in self.tasks:
            self.tasks[key] = (digest, asyncio.ensure_future(handler(call)))
            self._forget()
        seen, task = self.tasks[key]
        if seen != digest:
            raise RpcError(409, f"request id {call.request_id} was used for another body")
        # a caller that gives up must not cancel the work for the one who asks again
        return await asyncio.shield(task)

    def _forget(self) -> None:
        done = [key for key, (_, task) in self.tasks.items() if task.done()]
        for key in done[: max(0, len(self.tasks) - self.limit)]:
            del self.tasks[key]


class Service:
    def __init__(
        self,
        name: str,
        token: str,
        *,
        max_body: int = 16 << 20,
        status: Callable[[], dict] = dict,
        metrics: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.name = name
        self.url = ""
        self._token = token
        self._status = status
        self._metrics = metrics
        self._started = time.time()
        self._answers = Answers()
        self._app = web.Application(client_max_size=max_body)
        self._runner: web.AppRunner | None = None
        self._app.router.add_get("/health", self._health)
        self.get("/status", self._status_reply)
        self._app.router.add_get("/metrics", self._metrics_text)

    def get(self, path: str, handler: Handler) -> None:
        self._app.router.add_get(path, self._route(path, handler, once=False))

    def post(self, path: str, handler: Handler, *, once: bool = False) -> None:
        """`once`: the same request id gets the recorded (or still running) answer, so that a call can be repeated."""
        self._app.router.add_post(path, self._route(path, handler, once=once))

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Binds, serves, and returns the URL; port 0 takes a free one."""
        listener = bound_socket(host, port)
        self._runner = web.AppRunner(self._app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()
        self.url = f"http://{host}:{listener.getsockname()[1]}"
        return self.url

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _route(self, path: str, handler: Handler, *, once: bool) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(request: web.Request) -> web.Response:
            if not bearer_ok(request.headers, self._token):
                return _refusal(401, "the run's token is missing or wrong")
            try:
                body = await request.read() if request.can_read_body else b""
                request_id = request.headers.get(REQUEST_ID) or uuid.uuid4().hex
                call = Call(dict(request.match_info), dict(request.query), body, request_id)
                reply = await (self._answers.get(path, call, handler) if once else handler(call))
            except RpcError as error:
                return _refusal(error.status or 502, error.message)
            except web.HTTPRequestEntityTooLarge:
                return _refusal(413, f"body is larger than {self._app._client_max_size} bytes")
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                return _refusal(500, f"{type(error).__name__}: {error}")
            if isinstance(reply, bytes):
                return web.Response(body=reply, content_type="application/octet-stream")
            return web.Response(text=json.dumps(reply), content_type="application/json")

        return answer

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"ok": True, "name": self.name})

    async def _status_reply(self, call: Call) -> Reply:
        uptime = time.time() - self._started
        return {"name": self.name, "pid": os.getpid(), "uptime": round(uptime, 3), **self._status()}

    async def _metrics_text(self, request: web.Request) -> web.Response:
        if not bearer_ok(request.headers, self._token):
            return _refusal(401, "the run's token is missing or wrong")
        return web.Response(text=prometheus_text(self.name, self._metrics()), content_type="text/plain")


def bound_socket(host: str, port: int = 0, backlog: int = 512) -> socket.socket:
    """A listening TCP socket on exactly this interface."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:  # a restarted service may take its old port although connections linger in TIME_WAIT
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTakenError(host, port) from None
        raise
    listener.setblocking(False)
    return listener


def prometheus_text(name: str, metrics: Mapping[str, float]) -> str:
    """Prometheus' text format; a key that is no metric name is bent into one."""
    lines = [f"{_metric_name(name)}_up 1"]
    lines += [f"{_metric_name(name)}_{_metric_name(key)} {float(value)!r}" for key, value in sorted(metrics.items())]
    return "\n".join(lines) + "\n"


def serve_in_thread(service: Service, host: str = "127.0.0.1") -> str:
    """Serves from a daemon thread with its own event loop (for processes whose main thread computes)."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"rpc-{service.name}", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(service.start(host), loop).result(timeout=30)


def _metric_name(text: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", text)


def _refusal(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)
