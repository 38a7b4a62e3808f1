"""vLLM's HTTP protocol: token in, token out through /inference/v1/generate, weights through its development routes.

    client = VLLMClient("http://127.0.0.1:8000")
    answer = await client.generate(
        prompt={"image_path": "picture.png", "text": "How many?"}, max_new_tokens=64, temperature=0.0
    )
    print(answer["text"])

Owns requests and answers of one server, and what is done where a server is too old to say which version sampled what.
Which server is asked, and what happens to a lost request, is core.rollout's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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

GENERATE = "/inference/v1/generate"
_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "stop_token_ids", "ignore_eos", "logit_bias")},
    **{name: name for name in ("stop", "skip_special_tokens", "frequency_penalty", "presence_penalty")},
    "repetition_penalty": "repetition_penalty",
}
# a generator for each request makes vLLM draw row by row; answers are not reproducible on it anyway
_LEFT_OUT = frozenset({"sampling_seed"})


@dataclass(frozen=True)
class Offer:
    """What this server can do, asked of it once: its routes, not its version number, say so."""

    model: str
    root: str
    context_length: int | None
    tells_versions: bool
    aborts_by_route: bool
    takes_images: bool


class VLLMClient:
    """Asynchronous; belongs to the event loop that first uses it. Loads go through one client of a server."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout: float = 3600.0,
        tokenizer_path: str | None = None,
        max_num_seqs: int | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._connection = Connection(url, token, timeout=timeout)
        self._questions = Questions(self, tokenizer_path)
        self._max_num_seqs = max_num_seqs
        self._offer: Offer | None = None
        self._version: str | None = None
        self._loads = 0

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
        """Token in, token out. Streamed, `partial` holds what had arrived when ServerLostError is raised.

        An aborted request comes back unfinished, with the tokens so far.
        """
        generation = partial if partial is not None else Generation()
        offer = await self.offer()
        if len(request.images) and not offer.takes_images:
            # its parser drops what it does not know: it would answer about no image at all
            raise ServerRefusedError(f"{self.url}: {GENERATE} of this vLLM takes no images (0.26 is such, 0.32 is not)")
        sent = _Sent(self._version, self._loads, offer.tells_versions)
        async with self._connection.answer(GENERATE, _body(request, offer.model, stream)) as reply:
            if not stream:
                self._take(generation, json.loads(await reply.read()), sent)
                progress()
            else:
                async for chunk in events(reply):
                    self._take(generation, chunk, sent)
                    progress()
        if not generation.finish_reason:
            raise ServerLostError(f"{self.url}: the answer ended without a finish reason")
        return generation

    async def abort(self, rid: str = "", *, everything: bool = False) -> None:
        """Without the route, a request ends when its connection is closed: cancel generate_ids."""
        if (await self.offer()).aborts_by_route:
            body = {} if everything else {"request_ids": [f"generate-tokens-{rid}"]}
            await self._connection.post("/abort_requests", body, timeout=30)

    async def pause(self, *, timeout: float = 120.0) -> None:
        """Requests in flight stay, and are computed anew on resume; new ones wait.

        Where spans of versions are not told they come back at once instead, to be sent again: one version an answer.
        """
        mode = "keep" if (await self.offer()).tells_versions else "abort"
        await self._connection.post(f"/pause?mode={mode}", None, timeout=timeout)

    async def resume(self, *, timeout: float = 120.0) -> None:
        await self._connection.post("/resume", None, timeout=timeout)

    async def load(self, path: str, version: str, *, timeout: float = 600.0) -> None:
        """Weights from a directory on the server's node, while it is paused.

        Verified beforehand: a missing directory ends the engine at its next request, with /health still 200.
        """
        offer = await self.offer()
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self._loads += 1
        try:
            await self._connection.post("/collective_rpc", body, timeout=timeout)
            if offer.tells_versions:
                await self._connection.post("/update_weight_version", {"new_version": version}, timeout=30)
        except ServerRefusedError as error:
            raise LoadRefusedError(f"{self.url}: {error}") from error
        self._version = version

    async def model_info(self, *, timeout: float = 30.0) -> dict[str, Any]:
        """In SGLang's words. A server that does not tell its version has the one that was loaded through here."""
        offer = await self.offer()
        version: Any = self._version
        if offer.tells_versions:
            version = (await self._connection.get("/weight_info", timeout=timeout)).get("weight_version")
        else:
            await self._connection.get("/v1/models", timeout=timeout)
        return {"model_path": offer.root, "weight_version": version, "context_length": offer.context_length}

    async def capacity(self) -> int | None:
        """What it was started with: no route of it says so."""
        return self._max_num_seqs

    async def offer(self) -> Offer:
        if self._offer is None:
            told = await self._connection.get("/openapi.json", timeout=30)
            routes = told.get("paths", {})
            if GENERATE not in routes:
                raise ServerRefusedError(f"{self.url} has no {GENERATE}: start vLLM with --enable-scale-out", 404)
            models = (await self._connection.get("/v1/models", timeout=30)).get("data") or [{}]
            card: Mapping[str, Any] = models[0]
            self._offer = Offer(
                model=card.get("id", ""),
                root=card.get("root") or card.get("id", ""),
                context_length=card.get("max_model_len"),
                tells_versions={"/weight_info", "/update_weight_version"} <= routes.keys(),
                aborts_by_route="/abort_requests" in routes,
                takes_images="content_parts" in _fields(told, "GenerateRequest"),
            )
        return self._offer

    async def close(self) -> None:
        await self._connection.close()

    def _take(self, generation: Generation, chunk: dict[str, Any], sent: _Sent) -> None:
        if "error" in chunk:
            error = chunk["error"]
            raise ServerRefusedError(str(error.get("message", error) if isinstance(error, dict) else error))
        if chunk.get("prompt_token_ids"):
            generation.prompt_ids = chunk["prompt_token_ids"]
        for choice in chunk.get("choices") or []:
            ids = choice.get("token_ids") or []
            generation.output_ids.extend(ids)
            content = (choice.get("logprobs") or {}).get("content") or []
            generation.logprobs.extend(entry["logprob"] for entry in content)
            generation.finish_reason = choice.get("finish_reason") or generation.finish_reason
            generation.stop_matched = _matched(choice, generation)
            generation.versions = self._versions(choice, generation, sent)

    def _versions(self, choice: dict[str, Any], generation: Generation, sent: _Sent) -> list[int]:
        """Of every token so far; empty where it cannot be known, so that the tokens are not used."""
        count = len(generation.output_ids)
        spans = choice.get("weight_versions")
        if spans:
            return spread(spans, count)
        if sent.version is None or (generation.finish_reason == "" and self._loads != sent.loads):
            return []
        if self._loads == sent.loads or (not sent.tells_versions and generation.finish_reason == "abort"):
            return [version_number(sent.version)] * count
        if count:
            # it may have been queued through the load: which version answered is not told
            raise ServerLostError(f"{self.url}: weights were loaded while it answered, and it does not tell versions")
        return []


def _fields(told: Mapping[str, Any], schema: str) -> Mapping[str, Any]:
    """The fields of a request's body, by an OpenAPI document."""
    return told.get("components", {}).get("schemas", {}).get(schema, {}).get("properties", {})


@dataclass(frozen=True)
class _Sent:
    """What the server was on when a request left."""

    version: str | None
    loads: int
    tells_versions: bool


def sampling_params(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's names in vLLM's; with the log-probability of each sampled token. Raises KeyError for an unknown one."""
    params = {_NAMES[name]: value for name, value in sampling.items() if name not in _LEFT_OUT}
    return {**params, "logprobs": 0, "detokenize": bool(params.get("stop"))}


def _body(request: Request, model: str, stream: bool) -> bytes:
    rest = {
        "model": model,
        "request_id": request.rid,
        "token_ids": list(request.input_ids),
        "sampling_params": sampling_params(request.sampling),
        "return_token_ids": True,
        "stream": stream,
    }
    images = b""
    if len(request.images):
        images = b', "content_parts": ' + request.images.encoded("vllm", _content_parts)
    return json.dumps(rest)[:-1].encode() + images + b"}"


def _content_parts(urls: list[str]) -> bytes:
    return json.dumps([{"type": "image_url", "url": url} for url in urls]).encode()


def _matched(choice: dict[str, Any], generation: Generation) -> int | str | None:
    if choice.get("finish_reason") != "stop":
        return None
    reason = choice.get("stop_reason")
    return reason if reason is not None else generation.output_ids[-1] if generation.output_ids else None
