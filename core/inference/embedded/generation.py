"""/generate and /health_generate: requests of the protocol into the engine, tokens back out, whole or streamed.

Owns the translation both ways and the fate of a request whose client goes away. Weights, pauses and the token are the
server's affair.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import Counter
from typing import Any

from aiohttp import web

from core.inference.embedded.bodies import error_reply, read_json
from core.inference.embedded.engine import Engine, State
from core.inference.embedded.pictures import Pictures
from core.inference.embedded.request import BadRequestError, ModelTraits, Prompt, Request, Sampling
from core.telemetry.phases import announce

PROBE_SECS = 20.0
# A chunk holds everything so far: one for each token would cost the square of an answer's length.
STREAM_SECS = 0.05


class Generation:
    def __init__(self, engine: Engine, traits: ModelTraits, pictures: Pictures) -> None:
        self.engine = engine
        self.traits = traits
        self.pictures = pictures
        self.ended: Counter[str] = Counter()

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = await read_json(http)
        stream = body.get("stream", False) is True
        request = await self._request(body)
        request.every = STREAM_SECS if stream else None
        changed = _watch(request)
        start = time.perf_counter()
        announce("generate")
        try:
            await asyncio.wrap_future(self.engine.submit(request))
            if stream:
                response = await self._stream(http, request, body, changed, start)
            else:
                while not request.done:
                    await changed.wait()
                    changed.clear()
                response = self._whole(request, body, start)
        except BaseException:  # refused, or cancelled because the client has gone
            self.engine.withdraw(request)
            raise
        self.ended["error" if request.finish is None else str(request.finish["type"])] += 1
        return response

    async def health_generate(self, http: web.Request) -> web.Response:
        """One token within a deadline: the only health that says that the engine computes."""
        if self.engine.state is not State.SERVING:
            return error_reply(503, f"the engine is {self.engine.state.value}")
        plain = next(token for token in range(self.traits.vocab_size) if token not in self.traits.placeholders)
        sampling = Sampling.parse({"max_new_tokens": 1, "temperature": 0.0}, self.traits)
        request = Request(f"health-{uuid.uuid4().hex}", Prompt.expand([plain], (), self.traits), sampling)
        changed = _watch(request)
        try:
            await asyncio.wrap_future(self.engine.submit(request))
            await asyncio.wait_for(changed.wait(), PROBE_SECS)
        except BaseException as error:
            self.engine.withdraw(request)
            if isinstance(error, TimeoutError):
                return error_reply(503, f"no token within {PROBE_SECS:g} s")
            raise
        if request.error is not None:
            return error_reply(503, request.error)
        return web.json_response({"ok": True})

    def _whole(self, request: Request, body: dict[str, Any], start: float) -> web.Response:
        if request.error is not None:
            return error_reply(500, request.error)
        return web.Response(text=json.dumps(self._answer(request, body, start)), content_type="application/json")

    async def _stream(
        self, http: web.Request, request: Request, body: dict[str, Any], changed: asyncio.Event, start: float
    ) -> web.StreamResponse:
        """Server-sent events of everything so far, every STREAM_SECS if the client keeps up."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        done = False
        while not done:
            await changed.wait()
            changed.clear()
            done = request.done
            if request.error is not None:
                chunk: dict[str, Any] = {"error": {"message": request.error, "type": "internal_error", "code": 500}}
            else:
                chunk = self._answer(request, body, start)
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _request(self, body: dict[str, Any]) -> Request:
        input_ids = body.get("input_ids")
        if not isinstance(input_ids, list) or (input_ids and isinstance(input_ids[0], list)):
            raise BadRequestError(
                "input_ids must be one list of token ids: the embedded server takes no text, no batch"
            )
        params = body.get("sampling_params") or {}
        if not isinstance(params, dict):
            raise BadRequestError("sampling_params must be an object")
        rid = body.get("rid") or uuid.uuid4().hex
        if not isinstance(rid, str):
            raise BadRequestError("rid must be a string")
        sampling = Sampling.parse(params, self.traits)
        prompt = Prompt.expand(input_ids, await self.pictures.read(body.get("image_data")), self.traits)
        if len(prompt.ids) + sampling.max_new_tokens > self.traits.context_length:
            raise BadRequestError(
                f"{len(prompt.ids)} prompt tokens (images expanded) + max_new_tokens={sampling.max_new_tokens} are "
                f"more than the context of {self.traits.context_length} tokens: shorten the prompt, lower "
                "max_new_tokens or raise embedded.context_length"
            )
        return Request(rid, prompt, sampling)

    def _answer(self, request: Request, body: dict[str, Any], start: float) -> dict[str, Any]:
        # the engine's thread may append meanwhile: it writes ids after logprobs and spans, and the finish last
        count = len(request.output_ids)
        finish = request.finish
        if count != len(request.output_ids):
            finish = None
        spans = [
            {"version": version, "start": first, "end": min(end, count)}
            for version, first, end in list(request.spans)
            if first < count
        ]
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": finish,
            "prompt_tokens": len(request.prompt.ids),
            "completion_tokens": count,
            "cached_tokens": request.cached_tokens,
            "image_tokens": sum(image.tokens(self.traits.merge) for image in request.prompt.images),
            "weight_version": spans[-1]["version"] if spans else self.engine.version,
            "weight_versions": spans,
            "e2e_latency": time.perf_counter() - start,
        }
        answer: dict[str, Any] = {"text": "", "output_ids": request.output_ids[:count], "meta_info": meta}
        if body.get("return_logprob"):
            pairs = zip(request.logprobs[:count], answer["output_ids"], strict=True)
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        if body.get("return_prompt_token_ids"):
            answer["prompt_token_ids"] = request.prompt.ids.tolist()
        return answer


def _watch(request: Request) -> asyncio.Event:
    """An event of this loop that the engine's thread sets when the request has changed."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()

    def notify(_: Request) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(changed.set)

    request.notify = notify
    return changed
