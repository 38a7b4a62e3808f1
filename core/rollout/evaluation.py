"""Held-out rows through the servers, beside training: one answer a row, greedy unless eval_gconfig says otherwise.

Owns running and finished evaluations; answers come from the workflow, holding of weight loads is asked of the updates.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from core.config.generation import Generation as GenerationConfig
from core.rl.trajectory import Sample
from core.rollout.prompts import DataService, PromptSource
from core.rollout.update import WeightUpdates
from core.rollout.workflow import GroupVoidError, Prompt, Workflow
from core.telemetry.phases import announce

_AT_ONCE = 64
_AHEAD = 64


@dataclass(frozen=True)
class EvaluationRequest:
    id: str
    step: int
    split: str = "valid"
    hold_publishing: bool = False
    shuffle_images: bool = False

    @staticmethod
    def from_json(body: dict[str, Any]) -> EvaluationRequest:
        return EvaluationRequest(
            str(body["id"]),
            int(body["step"]),
            str(body.get("split", "valid")),
            bool(body.get("hold_publishing", False)),
            bool(body.get("shuffle_images", False)),
        )


@dataclass
class Evaluation:
    """One evaluation; `error` is set when it could not be finished."""

    request: EvaluationRequest
    started: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    failed: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    secs: float = 0.0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    _result: dict[str, Any] = field(default_factory=dict)

    def result(self) -> dict[str, Any]:
        return self._result if self.done.is_set() else {"done": False, "rows": len(self.samples)}

    def finish(self) -> None:
        """Only what was counted is kept: a long run has many evaluations."""
        self.secs = time.monotonic() - self.started
        self._result = self._counted()
        self.samples.clear()
        self.done.set()

    def _counted(self) -> dict[str, Any]:
        versions = np.concatenate([sample.versions for sample in self.samples]) if self.samples else np.zeros(0)
        failed = sum(self.failed.values())
        rows = len(self.samples) + failed
        return {
            "done": True,
            "id": self.request.id,
            "step": self.request.step,
            "accuracy": sum(sample.accuracy for sample in self.samples) / max(rows, 1),
            "reward_mean": sum(sample.reward for sample in self.samples) / max(rows, 1),
            "rows": rows,
            "version_min": int(versions.min()) if len(versions) else None,
            "version_max": int(versions.max()) if len(versions) else None,
            "truncated_fraction": sum(sample.truncated for sample in self.samples) / max(len(self.samples), 1),
            "secs": self.secs,
            "failed": failed,
            "failures": self.failed,
            "error": self.error,
        }


class Evaluations:
    def __init__(
        self, data: DataService, workflow: Workflow, updates: WeightUpdates, generation: GenerationConfig
    ) -> None:
        self._data = data
        self._workflow = workflow
        self._updates = updates
        self._generation = generation
        self._all: dict[str, Evaluation] = {}
        self._tasks: set[asyncio.Task] = set()

    def start(self, request: EvaluationRequest) -> None:
        """The same id again changes nothing."""
        if request.id in self._all:
            return
        evaluation = self._all[request.id] = Evaluation(request)
        task = asyncio.create_task(self._run(evaluation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def result(self, identity: str, wait: float) -> dict[str, Any] | None:
        evaluation = self._all.get(identity)
        if evaluation is None:
            return None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(evaluation.done.wait(), wait)
        return evaluation.result()

    def running(self) -> list[str]:
        return [identity for identity, evaluation in self._all.items() if not evaluation.done.is_set()]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, evaluation: Evaluation) -> None:
        held = False
        try:
            if evaluation.request.hold_publishing:
                await self._updates.hold()
                held = True
            evaluation.started = time.monotonic()
            announce("evaluation")
            prompts = await self._prompts(evaluation)
            images = shuffled(prompts) if evaluation.request.shuffle_images else prompts
            gate = asyncio.Semaphore(_AT_ONCE)
            await asyncio.gather(*(self._answer(evaluation, gate, p, q) for p, q in zip(prompts, images, strict=True)))
        except Exception as error:
            evaluation.error = f"{type(error).__name__}: {error}"
            traceback.print_exc(file=sys.stderr)
        finally:
            if held:
                self._updates.release_hold()
        evaluation.finish()  # not when it was cancelled: a service that ends has no result

    async def _prompts(self, evaluation: Evaluation) -> list[Prompt]:
        source = PromptSource(self._data, evaluation.request.split, {"epoch": 0, "position": 0}, ahead=_AHEAD)
        prompts = []
        while (taken := await source.next()) is not None:
            if "error" in taken[0]:
                _count(evaluation.failed, "bad row")
            else:
                prompts.append(Prompt.from_json(taken[0]))
        return prompts

    async def _answer(self, evaluation: Evaluation, gate: asyncio.Semaphore, prompt: Prompt, shown: Prompt) -> None:
        async with gate:
            try:
                pngs = await asyncio.gather(*(self._data.image(image.hash) for image in shown.images))
                group = await self._workflow.run(
                    prompt,
                    pngs,
                    self._generation,
                    n_samples=1,
                    started_version=self._updates.served_version(),
                    check_ids=shown is prompt,
                )
            except GroupVoidError as error:
                print(f"evaluation: {prompt.prompt_id}: {error.reason}: {error}", file=sys.stderr, flush=True)
                _count(evaluation.failed, error.reason)
            else:
                evaluation.samples.extend(group.samples)


def greedy(generation: GenerationConfig) -> GenerationConfig:
    """The same limits, one answer, the likeliest token each time."""
    return generation.model_copy(update={"greedy": True, "n_samples": 1, "top_p": 1.0, "frequency_penalty": 0.0})


def shuffled(prompts: Sequence[Prompt]) -> list[Prompt]:
    """For each prompt the next one that shows as many images; the control of a model that looks at its images."""
    by_count: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        by_count.setdefault(len(prompt.images), []).append(i)
    shown = list(prompts)
    for indices in by_count.values():
        for i, following in zip(indices, [*indices[1:], indices[0]], strict=True):
            shown[i] = prompts[following]
    return shown


def _count(counts: dict[str, int], reason: str) -> None:
    counts[reason] = counts.get(reason, 0) + 1
