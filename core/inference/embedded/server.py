"""SGLang's HTTP protocol in front of the embedded engine.

Owns the routes, the token, and what changes the whole engine: weights, pauses, aborts, caches. Requests and answers of
/generate are generation's. The event loop waits for futures only: it never computes, and the engine never waits for it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from core.inference.embedded.bodies import error_reply, read_json
from core.inference.embedded.engine import Engine, EngineStoppedError, LoadError
from core.inference.embedded.generation import Generation
from core.inference.embedded.pictures import Pictures
from core.inference.embedded.request import BadRequestError, ModelTraits
from core.rpc.auth import bearer_ok
from core.rpc.service import bound_socket, prometheus_text

MAX_BODY = 256 << 20
_PAUSE_MODES = ("abort", "retract", "in_place")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EmbeddedServer:
    """One engine behind one URL; every route but /health wants the token (None, by hand only: no token at all)."""

    def __init__(self, engine: Engine, traits: ModelTraits, pictures: Pictures, *, token: str | None) -> None:
        self.engine = engine
        self.traits = traits
        self.pictures = pictures
        self.generation = Generation(engine, traits, pictures)
        self._token = token
        self._started = time.time()
        self._runner: web.AppRunner | None = None
        self._app = web.Application(client_max_size=MAX_BODY, middlewares=[self._guard()])
        gets: dict[str, Handler] = {
            "/health": self._health,
            "/health_generate": self.generation.health_generate,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/flush_cache": self._flush,
            "/status": self._status,
            "/metrics": self._metrics,
        }
        posts: dict[str, Handler] = {
            "/generate": self.generation.generate,
            "/update_weights_from_disk": self._update,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/flush_cache": self._flush,
        }
        self._app.add_routes([web.get(path, handler) for path, handler in gets.items()])
        self._app.add_routes([web.post(path, handler) for path, handler in posts.items()])

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Binds, serves, and returns the URL; port 0 takes a free one."""
        listener = bound_socket(host, port)
        # a client that goes away cancels its handler, which takes its request out of the batch
        self._runner = web.AppRunner(self._app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        self.pictures.close()

    def status(self) -> dict[str, Any]:
        engine, batch = self.engine, self.engine.batch
        return {
            "name": "embedded",
            "pid": os.getpid(),
            "uptime": round(time.time() - self._started, 3),
            "state": engine.state.value,
            "weight_version": engine.version,
            "model_path": engine.model_path,
            "running": len(batch.running),
            "waiting": len(batch.waiting),
            "ended": dict(self.generation.ended),
            "secs_since_token": round(time.monotonic() - engine.last_token, 3),
            "last_load_secs": round(engine.load_secs, 4),
            "failure": None if engine.failure is None else str(engine.failure),
            **{key: round(value, 3) for key, value in self.counters().items()},
        }

    def counters(self) -> dict[str, float]:
        engine, batch = self.engine, self.engine.batch
        return {
            "sampled_tokens": batch.sampled_tokens,
            "prefilled_tokens": batch.prefilled_tokens,
            "prompt_cache_hits": batch.prompts.hits,
            "images_decoded": self.pictures.decoded,
            "steps": engine.steps,
            "busy_secs": engine.busy_secs,
            "loads": engine.loads,
            "kv_bytes": batch.slots.bytes,
        }

    def _guard(self) -> Callable:
        token = self._token

        @web.middleware
        async def guard(http: web.Request, handler: Handler) -> web.StreamResponse:
            if http.path != "/health" and token is not None and not bearer_ok(http.headers, token):
                return error_reply(401, "the run's token is missing or wrong")
            try:
                return await handler(http)
            except BadRequestError as error:
                return error_reply(400, str(error))
            except EngineStoppedError as error:
                return error_reply(503, str(error))

        return guard

    async def _update(self, http: web.Request) -> web.Response:
        body = await read_json(http)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not path:
            raise BadRequestError("model_path must name a directory")
        update = self.engine.update(
            Path(path),
            self.engine.version if version is None else str(version),
            abort_all=body.get("abort_all_requests", False) is True,
            flush=body.get("flush_cache", True) is not False,
        )
        try:
            waiting = await asyncio.wrap_future(update)
        except LoadError as error:
            return web.json_response({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
        message = f"serving {self.engine.version}"
        return web.json_response({"success": True, "message": message, "num_paused_requests": waiting})

    async def _pause(self, http: web.Request) -> web.Response:
        mode = (await read_json(http)).get("mode", "abort")
        if mode not in _PAUSE_MODES:
            raise BadRequestError(f"mode must be one of {', '.join(_PAUSE_MODES)}, got {mode!r}")
        await asyncio.wrap_future(self.engine.pause(mode))
        return web.json_response({"status": "ok", "message": "Generation paused successfully."})

    async def _continue(self, http: web.Request) -> web.Response:
        await asyncio.wrap_future(self.engine.resume())
        return web.json_response({"status": "ok", "message": "Generation continued successfully."})

    async def _abort(self, http: web.Request) -> web.Response:
        body = await read_json(http)
        rid = body.get("rid")
        if not body.get("abort_all") and (not isinstance(rid, str) or not rid):
            raise BadRequestError("rid must name a request, or abort_all be true")
        count = await asyncio.wrap_future(self.engine.abort(None if body.get("abort_all") else rid))
        return web.json_response({"aborted": count})

    async def _flush(self, http: web.Request) -> web.Response:
        await asyncio.wrap_future(self.engine.flush())
        return web.json_response({"success": True, "message": "cached prompts dropped"})

    async def _model_info(self, http: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self.engine.model_path,
                "tokenizer_path": self.engine.model_path,
                "is_generation": True,
                "weight_version": self.engine.version,
                "context_length": self.traits.context_length,
                "has_image_understanding": self.traits.has_vision,
            }
        )

    async def _server_info(self, http: web.Request) -> web.Response:
        state = {"effective_max_running_requests_per_dp": self.engine.batch.slots.max_slots}
        return web.json_response({"internal_states": [state]})

    async def _status(self, http: web.Request) -> web.Response:
        return web.json_response(self.status())

    async def _metrics(self, http: web.Request) -> web.Response:
        batch = self.engine.batch
        gauges = {"running": len(batch.running), "waiting": len(batch.waiting)}
        return web.Response(text=prometheus_text("embedded", {**self.counters(), **gauges}), content_type="text/plain")

    async def _health(self, http: web.Request) -> web.Response:
        alive = self.engine.alive
        return web.json_response({"ok": alive, "state": self.engine.state.value}, status=200 if alive else 503)
