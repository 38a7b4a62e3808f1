"""A fresh answer of every server at the version that the trainer has now, for its parity gate.

Owns what is asked: the run's own first prompts, under the run's sampling, cut short. Nothing is graded, logged or
counted, and the data's cursor does not move.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

import numpy as np

from core.config.generation import Generation as GenerationConfig
from core.inference.client import Generation, Images, Request
from core.rl.trajectory import Sample
from core.rollout.pool import ServerPool
from core.rollout.prompts import DataService
from core.rollout.sampling import sampling_params
from core.rollout.servers import Server, ServerState
from core.rollout.workflow import Prompt

PROMPTS, TOKENS = 2, 32
_SERVING = ServerState.SERVING


class NotServedError(Exception):
    """Not every server answers with that version now."""


class Probe:
    def __init__(
        self,
        pool: ServerPool,
        data: DataService,
        generation: GenerationConfig,
        *,
        stop_ids: Sequence[int],
        banned: Sequence[int],
    ) -> None:
        self._pool = pool
        self._data = data
        self._generation = generation
        self._stop_ids = stop_ids
        self._banned = banned

    async def ask(self, version: int) -> list[Sample]:
        """Of each server a sample a prompt. Raises NotServedError, and what a server raises."""
        servers = self._pool.in_rotation()
        behind = [server.name for server in servers if server.served != version or server.state is not _SERVING]
        if not servers or behind:
            raise NotServedError(f"version {version} is not yet served by {', '.join(behind) or 'any server'}")
        rows = (await self._data.get("/prompts", split="train", epoch=0, position=0, n=4 * PROMPTS))["prompts"]
        prompts = [Prompt.from_json(row) for row in rows if "error" not in row][:PROMPTS]
        pngs = [await asyncio.gather(*(self._data.image(image.hash) for image in each.images)) for each in prompts]
        asked = [(server, each, Images(own)) for server in servers for each, own in zip(prompts, pngs, strict=True)]
        return await asyncio.gather(*(self._sample(*each) for each in asked))

    async def _sample(self, server: Server, prompt: Prompt, images: Images) -> Sample:
        params = sampling_params(
            self._generation, prompt_length=len(prompt.expanded_ids), stop_ids=self._stop_ids, banned=self._banned
        )
        params["max_new_tokens"] = min(params["max_new_tokens"], TOKENS)
        params["min_new_tokens"] = min(params["min_new_tokens"], TOKENS)
        request = Request(f"probe-{uuid.uuid4().hex}", prompt.input_ids, images, params)
        answer = await server.generate(request, stream=False, partial=Generation())
        return Sample(
            sample_id=f"{server.name}, {prompt.prompt_id}",
            group_id="probe",
            prompt_id=prompt.prompt_id,
            epoch=prompt.epoch,
            prompt_ids=np.array(answer.prompt_ids, np.int32),
            sampled_ids=np.array(answer.output_ids, np.int32),
            logprobs=np.array(answer.logprobs, np.float32),
            versions=np.array(answer.versions, np.int32),
            finish_reason=answer.finish_reason,
            reward=0.0,
            started_version=answer.versions[0] if answer.versions else -1,
            images=prompt.images,
        )
