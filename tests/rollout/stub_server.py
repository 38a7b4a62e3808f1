"""A server of SGLang's protocol, written from the protocol's description, with scripted answers and faults.

Its k-th token depends on (sampling_seed, absolute position) alone, so that an answer which went on elsewhere must equal
the unbroken one; its logprob tells the token. Nothing of the project is imported.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web
from PIL import Image

IMAGE_PAD = 5
STOP = 2
FIRST = 100
VARIETY = 50


def token_at(seed: int, position: int) -> int:
    return FIRST + (seed + position) % VARIETY


def logprob_of(token: int) -> float:
    return -0.01 * token


def expand(input_ids: list[int], images: list[str]) -> list[int]:
    """One placeholder per 28 x 28 pixels of each image."""
    expanded, remaining = [], list(images)
    for token in input_ids:
        count = 1
        if token == IMAGE_PAD:
            png = base64.b64decode(remaining.pop(0).split(",", 1)[1])
            width, height = Image.open(io.BytesIO(png)).size
            count = (width // 28) * (height // 28)
        expanded += [token] * count
    assert not remaining, "more images than placeholders"
    return expanded


class StubServer:
    """`length(rid)` is how many tokens an answer has, the stop token included; 0 = until max_new_tokens."""

    def __init__(self, name: str, *, token: str, version: str = "0", delay: float = 0.0) -> None:
        self.name = name
        self.token = token
        self.version = version
        self.delay = delay
        self.length: Callable[[str], int] = lambda rid: 3
        self.spoil: Callable[[list[int]], list[int]] = lambda ids: ids
        self.fail_loads = 0
        self.lie_about_version = False
        self.load_delay = 0.0
        self.stuck = False
        self.out_of_memory = False
        self.capacity: int | None = None
        self.third_token_on: str | None = None  # the version that it waits for
        self.calls: list[str] = []
        self.requests: list[dict[str, Any]] = []
        self.active = 0
        self.most_active = 0
        self.started = time.time()
        self.url = ""
        self.first_tokens = asyncio.Event()
        self._go = asyncio.Event()
        self._go.set()
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_post("/update_weights_from_disk", self._load)
        app.router.add_get("/model_info", self._info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/abort_request", self._abort)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        self.started = time.time()
        return self.url

    async def die(self) -> None:
        """Every connection breaks, the port closes."""
        if self._runner is None or self._runner.server is None:
            return
        for handler in list(self._runner.server.connections):
            if handler.transport is not None:
                handler.transport.abort()
        await self._runner.cleanup()

    def row(self, daemon: str) -> dict[str, Any]:
        return {
            "name": self.name,
            "url": self.url,
            "backend": "embedded",
            "daemon": daemon,
            "state": "up",
            "started": self.started,
        }

    async def _server_info(self, http: web.Request) -> web.Response:
        state = {} if self.capacity is None else {"effective_max_running_requests_per_dp": self.capacity}
        return web.json_response({"internal_states": [state]})

    def _allowed(self, http: web.Request) -> None:
        if http.headers.get("Authorization") != f"Bearer {self.token}":
            raise web.HTTPUnauthorized

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        self._allowed(http)
        body = await http.json()
        self.requests.append(body)
        if self.out_of_memory:
            return web.json_response({"error": "CUDA out of memory"}, status=500)
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            return await self._answer(http, body)
        finally:
            self.active -= 1

    async def _answer(self, http: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        params = body["sampling_params"]
        expanded = self.spoil(expand(body["input_ids"], body.get("image_data", [])))
        answer: dict[str, Any] = {
            "prompt_token_ids": expanded,
            "output_ids": [],
            "meta_info": {"output_token_logprobs": []},
        }
        stream = None
        if body.get("stream"):
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await stream.prepare(http)
        spans: list[dict[str, Any]] = []
        for token, finish in self._tokens(body, params, len(expanded)):
            await self._go.wait()
            await self._may_go_on(len(answer["output_ids"]))
            if self.delay:
                await asyncio.sleep(self.delay)
                await self._go.wait()
            count = len(answer["output_ids"])
            if not spans or spans[-1]["version"] != self.version:
                spans.append({"version": self.version, "start": count, "end": count})
            spans[-1]["end"] = count + 1
            answer["output_ids"].append(token)
            meta = answer["meta_info"]
            meta["output_token_logprobs"].append([logprob_of(token), token, None])
            meta |= {"completion_tokens": count + 1, "weight_versions": spans, "finish_reason": finish}
            self.first_tokens.set()
            if stream is not None:
                await stream.write(b"data: " + json.dumps(answer).encode() + b"\n\n")
        if stream is None:
            return web.json_response(answer)
        await stream.write(b"data: [DONE]\n\n")
        await stream.write_eof()
        return stream

    async def _may_go_on(self, count: int) -> None:
        while self.stuck or (count >= 2 and self.third_token_on not in (None, self.version)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def _tokens(self, body: dict[str, Any], params: dict[str, Any], start: int) -> list[tuple[int, dict | None]]:
        done = sum(token >= FIRST for token in body["input_ids"])
        wanted = self.length(body.get("rid", "")) or 1 << 30
        seed = params.get("sampling_seed", 0)
        tokens: list[tuple[int, dict | None]] = []
        for i in range(params["max_new_tokens"]):
            if done + i + 1 == wanted:
                return [*tokens, (STOP, {"type": "stop", "matched": STOP})]
            finish = {"type": "length", "length": params["max_new_tokens"]}
            tokens.append((token_at(seed, start + i), finish if i + 1 == params["max_new_tokens"] else None))
        return tokens

    async def _pause(self, http: web.Request) -> web.Response:
        self._allowed(http)
        self.calls.append(f"pause {(await http.json())['mode']}")
        self._go.clear()
        return web.json_response({"status": "ok"})

    async def _continue(self, http: web.Request) -> web.Response:
        self._allowed(http)
        self.calls.append("continue")
        self._go.set()
        return web.json_response({"status": "ok"})

    async def _load(self, http: web.Request) -> web.Response:
        self._allowed(http)
        body = await http.json()
        self.calls.append(f"load {body['model_path']} {body['weight_version']}")
        await asyncio.sleep(self.load_delay)
        if self.fail_loads > 0:
            self.fail_loads -= 1
            return web.json_response({"success": False, "message": "shapes differ"}, status=400)
        if not self.lie_about_version:
            self.version = body["weight_version"]
        return web.json_response({"success": True, "message": "", "num_paused_requests": self.active})

    async def _info(self, http: web.Request) -> web.Response:
        self._allowed(http)
        return web.json_response({"weight_version": self.version, "model_path": "/nowhere"})

    async def _abort(self, http: web.Request) -> web.Response:
        self.calls.append("abort")
        return web.json_response({})
