"""Does a server see images? The same prompt with its images and with grey ones must not be answered the same.

Owns that question and its verdict; it is asked once a service, on the first prompt that has an image.
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from core.data.images import encode_png
from core.inference.client import Generation, Images, Request, ServerLostError, ServerRefusedError
from core.rollout.pool import ServerPool
from core.rollout.sampling import BANNED
from core.rollout.workflow import Prompt

TOKENS = 8
_DEADLINE_SECS = 300.0
_GREY = 127


class BlindServerError(Exception):
    """Answers do not depend on the image."""


class ImageCheck:
    def __init__(self, pool: ServerPool, banned: Sequence[int]) -> None:
        self._pool = pool
        self._sampling = {
            "temperature": 0.0,
            "max_new_tokens": TOKENS,
            "ignore_eos": True,
            "logit_bias": {str(token): BANNED for token in banned},
        }
        self._done = False
        self._turn = asyncio.Lock()

    async def before(self, prompt: Prompt, pngs: Sequence[bytes]) -> None:
        """Raises BlindServerError. A server that goes away meanwhile is no verdict: the next prompt asks again."""
        if self._done or not pngs:
            return
        async with self._turn:
            if self._done:
                return
            try:
                async with asyncio.timeout(_DEADLINE_SECS):
                    await self._ask(prompt, pngs)
            except (ServerLostError, ServerRefusedError, TimeoutError) as error:
                print(f"whether images are seen could not be asked yet: {error}", file=sys.stderr, flush=True)
                return
            self._done = True

    async def _ask(self, prompt: Prompt, pngs: Sequence[bytes]) -> None:
        server = await self._pool.acquire()
        grey = [encode_png(np.full((*image.resized, 3), _GREY, np.uint8)) for image in prompt.images]
        seen, blank = await asyncio.gather(
            *(
                server.generate(self._request(prompt.input_ids, images), stream=False, partial=Generation())
                for images in (pngs, grey)
            )
        )
        if same_answer(seen, blank):
            raise BlindServerError(
                f"{server.name} ({server.url}) answers {prompt.prompt_id} exactly as it answers the same prompt with "
                "grey images: it does not see them. To go on all the same: rollout.parity=off"
            )

    def _request(self, input_ids: Sequence[int], pngs: Sequence[bytes]) -> Request:
        sampling: dict[str, Any] = dict(self._sampling)
        return Request(f"seen-{uuid.uuid4().hex}", input_ids, Images(pngs), sampling)


def same_answer(a: Generation, b: Generation) -> bool:
    return a.output_ids == b.output_ids and a.logprobs == b.logprobs
