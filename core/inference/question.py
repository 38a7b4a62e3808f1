"""A question about images in words, for use by hand: rendered in the model's chat template, answered in text.

Owns the way from words and picture files to ids and back; the request is the client's. The rollout does not come here.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.data.images import load_image
from core.data.tokenizer import Tokenizer
from core.inference.client import Generation, Images, InferenceClient, Request

_MAX_PIXELS = 1_003_520
_MIN_PIXELS = 3136


class Questions:
    """What a client that is used by hand answers in words; the tokenizer is the served model's, read once."""

    def __init__(self, client: InferenceClient, tokenizer_path: str | None) -> None:
        self._client = client
        self._path = tokenizer_path
        self._tokenizer: Tokenizer | None = None

    async def answer(self, prompt: dict[str, Any], sampling: dict[str, Any]) -> dict[str, Any]:
        if self._tokenizer is None:
            path = self._path or (await self._client.model_info())["model_path"]
            self._tokenizer = await asyncio.to_thread(Tokenizer, path)
        return await answer(self._client, self._tokenizer, prompt, sampling)


async def answer(
    client: InferenceClient, tokenizer: Tokenizer, prompt: dict[str, Any], sampling: dict[str, Any]
) -> dict[str, Any]:
    """`prompt`: {"text": …} and, where images are meant, "image_path": a path, or a list of them."""
    paths = prompt.get("image_path") or []
    paths = [paths] if isinstance(paths, str | Path) else list(paths)
    pictures = [
        await asyncio.to_thread(load_image, path, min_pixels=_MIN_PIXELS, max_pixels=_MAX_PIXELS) for path in paths
    ]
    content = [{"type": "image"} for _ in pictures] + [{"type": "text", "text": prompt["text"]}]
    ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": content}]))
    sampling.setdefault("stop_token_ids", list(tokenizer.stop_ids))
    images = Images([picture.png() for picture in pictures])
    generation = await client.generate_ids(Request(uuid.uuid4().hex, ids, images, sampling), stream=False)
    return _shown(generation, tokenizer.decode)


def _shown(generation: Generation, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    return {
        "text": decode(generation.output_ids),
        "output_ids": generation.output_ids,
        "prompt_ids": generation.prompt_ids,
        "logprobs": generation.logprobs,
        "versions": generation.versions,
        "finish_reason": generation.finish_reason,
    }
