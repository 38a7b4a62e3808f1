"""SGLang's HTTP protocol, also spoken by the embedded server: one client per server, usable alone.

    client = SGLangClient("http://127.0.0.1:30000")
    answer = await client.generate(
        prompt={"image_path": "picture.png", "text": "How many?"}, max_new_tokens=64, temperature=0.0
    )
    print(answer["text"])

Owns requests and answers of one server. Which server is asked, and what happens to a lost request, is core.rollout's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from core.inference.client import (
    Generation,
    LoadRefusedError,
    Request,
    ServerLostError,
    ServerRefusedError,
    spread,
    version_number,
)
from core.inference.connection import Connection, events
from core.inference.question import Questions


class SGLangClient:
    """Asynchronous; belongs to the event loop that first uses it."""

    def __init__(
        self, url: str, token: str | None = None, *, timeout: float = 3600.0, tokenizer_path: str | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._connection = Connection(url, token, timeout=timeout)
        self._questions = Questions(self, tokenizer_path)

    async def generate(
        self, prompt: dict[str, Any], max_new_tokens: int = 256, temperature: float = 1.0, **sampling: Any
    ) -> dict[str, Any]:
        """Answers a question about an image (`image_path`: a path, a list, or none) in the model's chat template."""
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, **sampling}
        return await self._questions.answer(prompt, sampling)

    async def generate_ids(
        self,
        request: Request,
        *,
        stream: bool,
        partial: Generation | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> Generation:
        """Token in, token out. Streamed, `partial` holds what had arrived when ServerLostError is raised."""
        generation = partial if partial is not None else Generation()
        async with self._connection.answer("/generate", _body(request, stream)) as reply:
            if not stream:
                _take(generation, json.loads(await reply.read()))
                progress()
            else:
                async for chunk in events(reply):
                    _take(generation, chunk)
                    progress()
        if not generation.finish_reason:
            raise ServerLostError(f"{self.url}: the answer ended without a finish reason")
        return generation

    async def abort(self, rid: str = "", *, everything: bool = False) -> None:
        await self._connection.post("/abort_request", {"rid": rid, "abort_all": everything}, timeout=30)

    async def pause(self, *, timeout: float = 120.0) -> None:
        """Requests in flight stay and their KV is computed anew on resume (retract); new ones wait."""
        await self._connection.post("/pause_generation", {"mode": "retract"}, timeout=timeout)

    async def resume(self, *, timeout: float = 120.0) -> None:
        await self._connection.post("/continue_generation", {}, timeout=timeout)

    async def load(self, path: str, version: str, *, timeout: float = 600.0) -> None:
        """Weights from a directory on the server's node. Verified beforehand: a torn file can kill the server."""
        body = {"model_path": path, "weight_version": version}
        try:
            said = await self._connection.post("/update_weights_from_disk", body, timeout=timeout)
        except ServerRefusedError as error:
            raise LoadRefusedError(f"{self.url}: {error}") from error
        if not said.get("success"):
            raise LoadRefusedError(f"{self.url}: {said.get('message', 'no reason given')}")

    async def model_info(self, *, timeout: float = 30.0) -> dict[str, Any]:
        return await self._connection.get("/model_info", timeout=timeout)

    async def capacity(self, *, timeout: float = 30.0) -> int | None:
        """Requests that it runs at once, as its memory allows."""
        states = (await self._connection.get("/server_info", timeout=timeout)).get("internal_states") or [{}]
        return states[0].get("effective_max_running_requests_per_dp")

    async def close(self) -> None:
        await self._connection.close()


def _body(request: Request, stream: bool) -> bytes:
    rest = {
        "input_ids": list(request.input_ids),
        "rid": request.rid,
        "sampling_params": request.sampling,
        "return_logprob": True,
        "return_prompt_token_ids": True,
        "stream": stream,
    }
    images = b""
    if len(request.images):
        images = b', "image_data": ' + request.images.encoded("sglang", lambda urls: json.dumps(urls).encode())
    return json.dumps(rest)[:-1].encode() + images + b"}"


def _take(generation: Generation, answer: dict[str, Any]) -> None:
    """Takes an answer, or a chunk of one: cumulative ones replace what was there, incremental ones extend it."""
    if "error" in answer:
        error = answer["error"]
        raise ServerRefusedError(str(error.get("message", error) if isinstance(error, dict) else error))
    meta = answer["meta_info"]
    ids = answer.get("output_ids") or []
    logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or []]
    total = int(meta.get("completion_tokens", len(ids)))
    if len(ids) == total:
        generation.output_ids = list(ids)
    else:
        generation.output_ids.extend(ids)
    if len(logprobs) == total:
        generation.logprobs = logprobs
    else:
        generation.logprobs.extend(logprobs)
    if answer.get("prompt_token_ids"):
        generation.prompt_ids = answer["prompt_token_ids"]
    generation.versions = versions_of(meta, len(generation.output_ids))
    reason = meta.get("finish_reason")
    if reason:
        generation.finish_reason = reason["type"] if isinstance(reason, dict) else str(reason)
        generation.stop_matched = reason.get("matched") if isinstance(reason, dict) else None


def versions_of(meta: dict[str, Any], count: int) -> list[int]:
    """The version of each output token, from the spans that the server reports."""
    spans = meta.get("weight_versions")
    if not spans:
        return [version_number(meta["weight_version"])] * count if "weight_version" in meta else []
    return spread(spans, count)
