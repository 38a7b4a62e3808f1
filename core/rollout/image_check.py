"""Does a server see images? The same prompt with its images and with grey ones must not be answered the same.

Owns that question and its verdict; every start of every server is asked on the first prompt with an image after it
came in, and again every rollout.parity_check_steps versions. A policy that is sure of every token answers alike
whatever it is shown, and that tells nothing of the server: then the next prompts are asked, too.
"""

from __future__ import annotations

import asyncio
import math
import sys
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from core.data.images import encode_png
from core.inference.client import Generation, Images, Request, ServerLostError, ServerRefusedError
from core.rollout.pool import ServerPool
from core.rollout.sampling import BANNED
from core.rollout.servers import Server, ServerState
from core.rollout.workflow import Prompt

TOKENS = 8
PROMPTS = 8
"""So many are asked, where the policy is sure of every token, before the question is left for the next time."""
SURE = 0.01
"""Less than this below 0 in log-probability: an image could not be told by it."""
_DEADLINE_SECS = 300.0
_GREY = 127
_EXACT = 1e-5  # of float32 in batches of another size


class BlindServerError(Exception):
    """Answers do not depend on the image."""


class ImageCheck:
    def __init__(self, pool: ServerPool, banned: Sequence[int], every: int | None = None) -> None:
        self._pool = pool
        self._every = every
        self._sampling = {
            "temperature": 0.0,
            "max_new_tokens": TOKENS,
            "ignore_eos": True,
            "logit_bias": {str(token): BANNED for token in banned},
        }
        self._asked: dict[str, tuple[float, int]] = {}
        self._unclear: Counter[tuple[str, float]] = Counter()
        """Of each start of a server: how many prompts have told nothing."""
        self._turn = asyncio.Lock()

    async def before(self, prompt: Prompt, pngs: Sequence[bytes]) -> None:
        """Raises BlindServerError. Where there is no verdict (the server went away), the next prompt asks again."""
        if not pngs or not (self._due() or not self._asked):
            return
        async with self._turn:
            if not self._asked:
                await self._pool.acquire()
            found = await asyncio.gather(*(self._sees(server, prompt, pngs) for server in self._due()))
        blind = [server for server, sees in found if sees is False]
        if blind:
            names = ", ".join(f"{server.name} ({server.url})" for server in blind)
            raise BlindServerError(
                f"{prompt.prompt_id} is answered by {names} exactly as the same prompt with grey images: it does not "
                "see them. To go on all the same: rollout.parity=warn"
            )

    def _due(self) -> list[Server]:
        return [
            server
            for server in self._pool.servers.values()
            if server.state is ServerState.SERVING and self._is_due(server)
        ]

    def _is_due(self, server: Server) -> bool:
        started, version = self._asked.get(server.name, (None, 0))
        return started != server.started or bool(self._every and (server.served or 0) >= version + self._every)

    async def _sees(self, server: Server, prompt: Prompt, pngs: Sequence[bytes]) -> tuple[Server, bool | None]:
        version = server.served or 0
        grey = [encode_png(np.full((*image.resized, 3), _GREY, np.uint8)) for image in prompt.images]
        try:
            async with asyncio.timeout(_DEADLINE_SECS):
                seen, blank, again = await asyncio.gather(
                    *(
                        server.generate(self._request(prompt.input_ids, images), stream=False, partial=Generation())
                        for images in (pngs, grey, pngs)
                    )
                )
        except (ServerLostError, ServerRefusedError, TimeoutError) as error:
            print(f"whether {server.name} sees images could not be asked yet: {error}", file=sys.stderr, flush=True)
            return server, None
        alike, start = same_answer(seen, blank, noise=distance(seen, again)), (server.name, server.started)
        if alike and is_sure(seen):
            self._unclear[start] += 1
            if self._unclear[start] < PROMPTS:
                return server, None
            print(f"whether {server.name} sees images cannot be told: the policy is sure of every token", flush=True)
        self._unclear.pop(start, None)
        self._asked[server.name] = (server.started, version)
        return server, not alike or is_sure(seen)

    def _request(self, input_ids: Sequence[int], pngs: Sequence[bytes]) -> Request:
        sampling: dict[str, Any] = dict(self._sampling)
        return Request(f"seen-{uuid.uuid4().hex}", input_ids, Images(pngs), sampling)


def same_answer(a: Generation, b: Generation, *, noise: float) -> bool:
    """Equal ids, with log-probabilities as near as two answers to one prompt are."""
    return distance(a, b) <= max(_EXACT, 3 * noise)


def is_sure(answer: Generation) -> bool:
    return all(logprob > -SURE for logprob in answer.logprobs)


def distance(a: Generation, b: Generation) -> float:
    """The largest difference of two log-probabilities; infinite where other ids were sampled."""
    if a.output_ids != b.output_ids:
        return math.inf
    return max((abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)), default=0.0)
