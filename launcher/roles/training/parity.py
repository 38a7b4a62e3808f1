"""The parity gate: the trainer's log-probabilities of what the servers sampled with the same weights.

Owns the comparison and its verdict. It is over tokens that the trainer's own version sampled, on the run's own prompts
with their images, under the temperature and the bans of the run; prompt ids and image-token counts were compared when
each answer came (core.rollout.workflow). Servers are looked at for blindness by core.rollout.image_check, the trainer
here; why the two disagree is found by launcher.roles.training.disagreement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from core.config.rollout import Rollout
from core.ops.packed import PackedBatch
from core.rollout.image_check import SURE
from launcher.roles.training.parts import Change

Rescore = Callable[[Sequence[Any], Change], list[Tensor]]  # collective: log-probabilities of some parts, changed


class ParityError(Exception):
    """Servers and trainer do not compute the same distribution."""


@dataclass(frozen=True)
class Parity:
    """Of |log π(trainer) - log μ(server)| over the tokens of one version."""

    tokens: int
    mean: float
    most: float
    worst: str
    """The sample of the largest mean."""
    bare_mean: float | None
    """Over samples without an image, where there are any."""
    image_effect: float | None = None
    """Mean change of the trainer's own when every image is grey, over samples with one; None where a policy that is
    sure of every token cannot tell."""


class Gate:
    """When the comparison is due, and what follows from it; every rank asks in step."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._pending = rollout.parity != "off"

    def is_due(self, step: int) -> bool:
        """Before the first step of these ranks, and every parity_check_steps; until tokens of its version are there."""
        every = self._rollout.parity_check_steps
        if self._rollout.parity != "off" and every and step % every == 0:
            self._pending = True
        return self._pending

    def passed(self, parity: Parity) -> bool:
        self._pending = False
        rollout = self._rollout
        return parity.mean <= rollout.parity_mean and parity.most <= rollout.parity_max and parity.image_effect != 0.0

    def refuse(self, said: str) -> str:
        """The warning. Raises ParityError where the run must not go on."""
        if self._rollout.parity == "stop":
            raise ParityError(f"{said}. To go on all the same: rollout.parity=warn")
        return said


def measure(parts: Sequence[Any], logps: Sequence[Tensor], version: int, exchange: Any) -> Parity | None:
    """Collective over the samples' ranks; None where the parts have no token of that version."""
    rows = []
    for part, logp_R in zip(parts, logps, strict=True):
        differences = (logp_R.float().cpu() - part.behave_R).abs().numpy() if part.samples else np.zeros(0)
        differences = np.where(np.isfinite(differences), differences, np.inf)
        start = 0
        for sample in part.samples:
            end = start + len(sample.sampled_ids)
            found = differences[start:end][np.asarray(sample.versions) == version]
            if found.size:
                rows.append(
                    (sample.sample_id, bool(sample.images), int(found.size), float(found.sum()), float(found.max()))
                )
            start = end
    everywhere = {row[0]: row for some in exchange.gather(rows) for row in some}
    return summary(list(everywhere.values()))


def with_image_effect(parity: Parity, parts: Sequence[Any], rescore: Rescore, exchange: Any) -> Parity:
    """Collective: whether the trainer sees its images, told by what becomes of its numbers when they are grey."""
    sums, sure = [0.0, 0.0], True
    for part, logp_R in zip(parts, rescore(parts, without_images), strict=True):
        if part.samples and part.prox_R is not None:
            moved = (logp_R.float() - part.prox_R.float()).abs().cpu().numpy()
            lengths = [len(sample.sampled_ids) for sample in part.samples]
            shown = np.repeat([bool(sample.images) for sample in part.samples], lengths)
            sums = [sums[0] + float(moved[shown].sum()), sums[1] + float(shown.sum())]
            sure = sure and bool((part.prox_R.float().cpu().numpy()[shown] > -SURE).all())
    everywhere = exchange.gather((sums, sure))
    moved_sum, tokens = np.sum([each for each, _ in everywhere], axis=0)
    if not tokens or (moved_sum == 0.0 and all(each for _, each in everywhere)):
        return replace(parity, image_effect=None)
    return replace(parity, image_effect=float(moved_sum / tokens))


def without_images(batch: PackedBatch) -> PackedBatch:
    """Every image grey; nameless, so that a frozen tower's kept features are not taken."""
    if batch.pixel_values_PK is None:
        return batch
    return replace(batch, pixel_values_PK=batch.pixel_values_PK * 0.0, image_names=())


def summary(rows: Sequence[tuple[str, bool, int, float, float]]) -> Parity | None:
    """Rows: sample, has images, tokens, sum and maximum of the differences."""
    tokens = sum(row[2] for row in rows)
    if not tokens:
        return None
    bare = [row for row in rows if not row[1]]
    bare_tokens = sum(row[2] for row in bare)
    return Parity(
        tokens,
        sum(row[3] for row in rows) / tokens,
        max(row[4] for row in rows),
        max(rows, key=lambda row: row[3] / row[2])[0],
        sum(row[3] for row in bare) / bare_tokens if bare_tokens else None,
    )
