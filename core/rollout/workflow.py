"""Single-turn answers to one prompt with images: n samples, graded, as one group.

Owns what a group is made of and what happens to a sample whose server goes away: it goes on elsewhere from the tokens
that arrived (one response, one continuation), or starts again from its prompt where none did; it is never spliced onto
another rendering of the prompt. Whether a void group matters is the collector's business.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from core.config.generation import Generation as GenerationConfig
from core.inference.client import Generation, Images, Request, ServerLostError, ServerRefusedError
from core.rewards.pool import Score
from core.rl.trajectory import Group, ImageRef, Sample, group_id_of
from core.rollout.pool import ServerPool
from core.rollout.sampling import continued, sampling_params, sampling_seed
from core.telemetry.phases import announce

STREAM_ABOVE = 16
_PROCESS = uuid.uuid4().hex[:8]  # a restarted service must not use a request id again
_REQUESTS = itertools.count()


class GroupVoidError(Exception):
    """A group that cannot be finished; `reason` is the kind it is counted under."""

    def __init__(self, reason: str, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.traceback = traceback or f"{reason}: {message}"


class Rewards(Protocol):
    async def grade(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Score: ...


class Decoder(Protocol):
    stop_ids: tuple[int, ...]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...


@dataclass(frozen=True)
class Prompt:
    """A row as the data service prepared it. `input_ids` have one placeholder per image, `expanded_ids` all of them."""

    prompt_id: str
    epoch: int
    position: int
    input_ids: list[int]
    expanded_ids: list[int]
    images: tuple[ImageRef, ...]
    row: dict[str, Any]
    prompt_text: str

    @staticmethod
    def from_json(value: dict[str, Any]) -> Prompt:
        return Prompt(
            value["prompt_id"],
            value["epoch"],
            value["position"],
            value["input_ids"],
            value["expanded_ids"],
            tuple(ImageRef.from_json(image) for image in value["images"]),
            value.get("row", {}),
            value.get("prompt_text", ""),
        )


@dataclass
class Interruptions:
    """What happened to samples whose server went away."""

    restarts: int = 0
    continuations: int = 0
    errors: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Settings:
    """`context_length`: what a server takes, prompt and answer together; None where it is not known."""

    seed: int
    banned: tuple[int, ...]
    context_length: int | None = None
    request_timeout: float = 3600.0
    request_retries: int = 3
    keep_partial: bool = True
    stream_above: int = STREAM_ABOVE


class Workflow:
    def __init__(self, pool: ServerPool, rewards: Rewards, decoder: Decoder, settings: Settings) -> None:
        self._pool = pool
        self._rewards = rewards
        self._decoder = decoder
        self._settings = settings
        self.interruptions = Interruptions()

    async def run(
        self,
        prompt: Prompt,
        pngs: Sequence[bytes],
        generation: GenerationConfig,
        *,
        n_samples: int,
        started_version: int,
        check_ids: bool = True,
        generated: Callable[[], None] = lambda: None,
    ) -> Group:
        """Raises GroupVoidError. A group is whole: one failed sample voids it and stops the others.

        `generated` is called when the servers are done with it; grading may go on.
        """
        unfinished = set(range(n_samples))

        def one_generated(number: int) -> None:
            unfinished.discard(number)
            if not unfinished:
                generated()

        params = self._params(prompt, generation)
        images = Images(pngs)
        group_id = group_id_of(prompt.epoch, prompt.position)
        announce("rollout")
        first = await self._pool.acquire()
        first.groups += 1
        answers = [
            _Answer(
                prompt,
                images,
                {**params, "sampling_seed": sampling_seed(self._settings.seed, prompt.epoch, prompt.prompt_id, i)},
                f"{group_id}-{i}",
                check_ids,
            )
            for i in range(n_samples)
        ]
        tasks = [
            asyncio.create_task(
                self._sample(answer, group_id, started_version, first.name, functools.partial(one_generated, i))
            )
            for i, answer in enumerate(answers)
        ]
        try:
            samples = await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        finally:
            first.groups -= 1
        return Group(group_id, prompt.epoch, prompt.position, prompt.prompt_id, started_version, tuple(samples))

    def _params(self, prompt: Prompt, generation: GenerationConfig) -> dict[str, Any]:
        params = sampling_params(
            generation,
            prompt_length=len(prompt.expanded_ids),
            stop_ids=self._decoder.stop_ids,
            banned=self._settings.banned,
        )
        wanted = len(prompt.expanded_ids) + params["max_new_tokens"]
        limit = self._settings.context_length
        if params["max_new_tokens"] < 1 or (limit is not None and wanted > limit):
            raise GroupVoidError(
                "prompt too long",
                f"{prompt.prompt_id}: {len(prompt.expanded_ids)} prompt tokens and up to {generation.max_new_tokens} "
                f"new ones do not fit the server's context of {limit} or gconfig.max_tokens={generation.max_tokens}",
            )
        return params

    async def _sample(
        self, answer: _Answer, group_id: str, started_version: int, preferred: str, generated: Callable[[], None]
    ) -> Sample:
        try:
            async with asyncio.timeout(self._settings.request_timeout):
                await self._generate(answer, preferred)
        except TimeoutError:
            raise GroupVoidError(
                "past its deadline",
                f"{answer.sample_id}: not whole within rollout.request_timeout={self._settings.request_timeout:g} s",
            ) from None
        generated()
        announce("reward")
        score, text = await self._grade(answer)
        prompt = answer.prompt
        return Sample(
            sample_id=answer.sample_id,
            group_id=group_id,
            prompt_id=prompt.prompt_id,
            epoch=prompt.epoch,
            prompt_ids=np.array(answer.expanded_ids, np.int32),
            sampled_ids=np.array(answer.output_ids, np.int32),
            logprobs=np.array(answer.logprobs, np.float32),
            versions=np.array(answer.versions, np.int32),
            finish_reason=answer.finish_reason,
            stop_matched=answer.stop_matched,
            reward=score.value,
            reward_parts=score.parts,
            reward_error=f"{score.kind}: {score.traceback}" if score.kind else None,
            images=prompt.images,
            prompt_text=prompt.prompt_text,
            text=text,
            started_version=started_version,
            restarts=answer.restarts,
            continuations=answer.continuations,
        )

    async def _generate(self, answer: _Answer, preferred: str) -> None:
        refusals = 0
        while True:
            server = await self._pool.acquire(preferred)
            partial = Generation()
            stream = answer.left() > self._settings.stream_above
            try:
                await server.generate(answer.request(), stream=stream, partial=partial)
            except ServerLostError as error:
                await self._pool.lost(server, error)
                self._interrupted(answer, partial)
            except ServerRefusedError as error:
                refusals += 1
                self.interruptions.errors[str(error)[:200]] += 1
                if refusals > self._settings.request_retries or 400 <= error.status < 500:
                    raise GroupVoidError("generation failed", f"{answer.sample_id}: {error}") from error
                self._pool.refused(server, error)
                self._interrupted(answer, partial)
                await asyncio.sleep(min(0.1 * 2**refusals, 5.0))
            else:
                server.refusals = 0
                if partial.finished:
                    answer.take(partial)
                    self._check(answer)
                    return
                self._interrupted(answer, partial)

    def _interrupted(self, answer: _Answer, partial: Generation) -> None:
        """The tokens that arrived are kept where they came with the ids that were asked for."""
        usable = self._settings.keep_partial and bool(partial.output_ids) and answer.fits(partial)
        if usable and len(partial.output_ids) < answer.left():
            answer.take(partial)
            answer.continuations += 1
            self.interruptions.continuations += 1
        else:
            answer.start_again()
            self.interruptions.restarts += 1

    def _check(self, answer: _Answer) -> None:
        banned = set(self._settings.banned).intersection(answer.output_ids)
        if banned:
            message = f"{answer.sample_id}: sampled the placeholder ids {sorted(banned)}"
            raise GroupVoidError("placeholder sampled", message)

    async def _grade(self, answer: _Answer) -> tuple[Score, str]:
        prompt = answer.prompt
        text = self._decoder.decode(answer.output_ids)
        images = [{"original": list(image.original), "resized": list(image.resized)} for image in prompt.images]
        row = {**prompt.row, "images": images, "finish_reason": answer.finish_reason}
        score = await self._rewards.grade([prompt.prompt_text, text, answer.expanded_ids, answer.output_ids], row)
        return score, text


class _Answer:
    """One answer as it grows over one server, or over several when they go away."""

    def __init__(
        self,
        prompt: Prompt,
        images: Images,
        params: dict[str, Any],
        sample_id: str,
        check_ids: bool,
    ) -> None:
        self.prompt = prompt
        self.sample_id = sample_id
        self.expanded_ids = prompt.expanded_ids
        self.restarts = 0
        self.continuations = 0
        self._images = images
        self._params = params
        self._check_ids = check_ids
        self._clear()

    def _clear(self) -> None:
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish_reason = ""
        self.stop_matched: int | str | None = None

    def left(self) -> int:
        return self._params["max_new_tokens"] - len(self.output_ids)

    def request(self) -> Request:
        rid = f"{self.sample_id}-{self.restarts}-{self.continuations}-{_PROCESS}.{next(_REQUESTS)}"
        ids = [*self.prompt.input_ids, *self.output_ids]
        return Request(rid, ids, self._images, continued(self._params, len(self.output_ids)))

    def fits(self, generation: Generation) -> bool:
        whole = len(generation.output_ids) == len(generation.logprobs) == len(generation.versions)
        return whole and generation.prompt_ids == [*self.expanded_ids, *self.output_ids]

    def take(self, generation: Generation) -> None:
        if not self._check_ids and not self.output_ids:
            self.expanded_ids = generation.prompt_ids
        expected = [*self.expanded_ids, *self.output_ids]
        if generation.prompt_ids != expected:
            raise GroupVoidError("prompt ids differ", self._difference(generation.prompt_ids, expected))
        counts = {len(generation.output_ids), len(generation.logprobs), len(generation.versions)}
        if len(counts) != 1:
            raise GroupVoidError(
                "generation failed", f"{self.sample_id}: ids, logprobs and versions are not as many: {sorted(counts)}"
            )
        self.output_ids = [*self.output_ids, *generation.output_ids]
        self.logprobs = [*self.logprobs, *generation.logprobs]
        self.versions = [*self.versions, *generation.versions]
        self.finish_reason = generation.finish_reason
        self.stop_matched = generation.stop_matched

    def start_again(self) -> None:
        self._clear()
        self.restarts += 1

    def _difference(self, given: list[int], expected: list[int]) -> str:
        first = next((i for i, (a, b) in enumerate(zip(given, expected, strict=False)) if a != b), None)
        first = min(len(given), len(expected)) if first is None else first
        return (
            f"{self.sample_id} ({self.prompt.prompt_id}): the server reports {len(given)} prompt ids, the data "
            f"service expanded to {len(expected)}; they differ from index {first} on"
        )
