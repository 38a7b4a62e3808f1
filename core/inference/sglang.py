"""SGLang's HTTP protocol, also spoken by the embedded server: one client per server, usable alone.

    client = SGLangClient("http://127.0.0.1:30000")
    answer = await client.generate(
        prompt={"image_path": "picture.png", "text": "How many?"}, max_new_tokens=64, temperature=0.0
    )
    print(answer["text"])

Owns requests and answers of one server. Which server is asked, and what happens to a lost request, is core.rollout's.
"""

from __future__ import annotations

import asyncio
import base64
import json
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import aiohttp

from core.data.images import load_image
from core.data.tokenizer import Tokenizer
from core.inference.client import (
    Generation,
    LoadRefusedError,
    Request,
    ServerLostError,
    ServerRefusedError,
    version_number,
)

_MAX_PIXELS = 1_003_520
_MIN_PIXELS = 3136


def prompt_body(input_ids: Sequence[int], pngs: Sequence[bytes]) -> bytes:
    """Prompt (ONE placeholder per image) and images as the inside of a JSON object, for Request.body."""
    images = ["data:image/png;base64," + base64.b64encode(png).decode() for png in pngs]
    fields: dict[str, Any] = {"input_ids": list(input_ids)}
    if images:
        fields["image_data"] = images
    return json.dumps(fields)[1:-1].encode()


class SGLangClient:
    """Asynchronous; belongs to the event loop that first uses it."""

    def __init__(
        self, url: str, token: str | None = None, *, timeout: float = 3600.0, tokenizer_path: str | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout = timeout
        self._tokenizer_path = tokenizer_path
        self._tokenizer: Tokenizer | None = None
        self._session: aiohttp.ClientSession | None = None

    async def generate(
        self, prompt: dict[str, Any], max_new_tokens: int = 256, temperature: float = 1.0, **sampling: Any
    ) -> dict[str, Any]:
        """Answers a question about an image (`image_path`: a path, a list, or none) in the model's chat template."""
        tokenizer = await self._load_tokenizer()
        paths = prompt.get("image_path") or []
        paths = [paths] if not isinstance(paths, list | tuple) else list(paths)
        pictures = [
            await asyncio.to_thread(load_image, path, min_pixels=_MIN_PIXELS, max_pixels=_MAX_PIXELS) for path in paths
        ]
        content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": prompt["text"]}]
        text = tokenizer.render([{"role": "user", "content": content}])
        sampling = {"max_new_tokens": max_new_tokens, "temperature": temperature, **sampling}
        sampling.setdefault("stop_token_ids", list(tokenizer.stop_ids))
        body = prompt_body(tokenizer.encode(text), [picture.png() for picture in pictures])
        generation = await self.generate_ids(Request(uuid.uuid4().hex, body, sampling), stream=False)
        return {
            "text": tokenizer.decode(generation.output_ids),
            "output_ids": generation.output_ids,
            "prompt_ids": generation.prompt_ids,
            "logprobs": generation.logprobs,
            "versions": generation.versions,
            "finish_reason": generation.finish_reason,
        }

    async def generate_ids(
        self,
        request: Request,
        *,
        stream: bool,
        partial: Generation | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> Generation:
        """Token in, token out. Streamed, `partial` holds what had arrived when ServerLostError is raised."""
        rest = {
            "rid": request.rid,
            "sampling_params": request.sampling,
            "return_logprob": True,
            "return_prompt_token_ids": True,
            "stream": stream,
        }
        data = b"{" + request.body + b", " + json.dumps(rest)[1:].encode()
        generation = partial if partial is not None else Generation()
        try:
            async with self._open().post(self.url + "/generate", data=data, headers=_JSON) as reply:
                if reply.status == 503:
                    raise ServerLostError(f"{self.url}: {_reason(reply.status, await reply.read())}")
                if reply.status != 200:
                    raise ServerRefusedError(_reason(reply.status, await reply.read()), reply.status)
                if not stream:
                    _take(generation, json.loads(await reply.read()))
                    progress()
                else:
                    async for chunk in _events(reply):
                        _take(generation, chunk)
                        progress()
        except (aiohttp.ClientError, ConnectionError, TimeoutError, json.JSONDecodeError) as error:
            raise ServerLostError(f"{self.url}: {error or type(error).__name__}") from error
        if not generation.finish_reason:
            raise ServerLostError(f"{self.url}: the answer ended without a finish reason")
        return generation

    async def abort(self, rid: str = "", *, everything: bool = False) -> None:
        await self._post("/abort_request", {"rid": rid, "abort_all": everything}, timeout=30)

    async def pause(self, mode: str = "retract", *, timeout: float = 120.0) -> None:
        """Requests in flight stay (retract: their KV is computed anew on resume); new ones wait."""
        await self._post("/pause_generation", {"mode": mode}, timeout=timeout)

    async def resume(self, *, timeout: float = 120.0) -> None:
        await self._post("/continue_generation", {}, timeout=timeout)

    async def load(self, path: str, version: str, *, timeout: float = 600.0) -> None:
        """Weights from a directory on the server's node. Verified beforehand: a torn file can kill the server."""
        body = {"model_path": path, "weight_version": version}
        try:
            answer = await self._post("/update_weights_from_disk", body, timeout=timeout)
        except ServerRefusedError as error:
            raise LoadRefusedError(f"{self.url}: {error}") from error
        if not answer.get("success"):
            raise LoadRefusedError(f"{self.url}: {answer.get('message', 'no reason given')}")

    async def model_info(self, *, timeout: float = 30.0) -> dict[str, Any]:
        return await self._call("GET", "/model_info", None, timeout)

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

    async def _post(self, path: str, body: dict[str, Any], *, timeout: float) -> dict[str, Any]:
        return await self._call("POST", path, body, timeout)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=30)
        try:
            async with self._open().request(method, self.url + path, json=body, timeout=limit) as reply:
                data = await reply.read()
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise ServerLostError(f"{self.url}{path}: {error or type(error).__name__}") from error
        if reply.status != 200:
            raise ServerRefusedError(f"{path}: {_reason(reply.status, data)}", reply.status)
        try:
            answer = json.loads(data) if data.strip().startswith(b"{") else {}
        except ValueError as error:
            raise ServerLostError(f"{self.url}{path}: answered what is not JSON") from error
        return answer

    async def _load_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            path = self._tokenizer_path or (await self.model_info())["model_path"]
            self._tokenizer = await asyncio.to_thread(Tokenizer, path)
        return self._tokenizer


_JSON = {"Content-Type": "application/json"}


async def _events(reply: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
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
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions):
            raise ServerRefusedError(f"weight_versions leave a gap before token {span['start']}: {spans}")
        versions += [version_number(span["version"])] * (span["end"] - span["start"])
    return versions[:count]


def _reason(status: int, data: bytes) -> str:
    try:
        value = json.loads(data)
        error = value.get("error", value.get("message", value)) if isinstance(value, dict) else value
        text = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        text = data[:500].decode("utf-8", "replace")
    return f"HTTP {status}: {text}"
