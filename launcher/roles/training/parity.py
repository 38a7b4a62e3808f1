"""The parity gate: the trainer's log-probabilities of what the servers sampled with the same weights.

Owns the comparison and its verdict. It is over tokens that the trainer's own version sampled, on the run's own prompts
with their images, under the temperature and the bans of the run; prompt ids and image-token counts were compared when
each answer came (core.rollout.workflow). Servers are looked at for blindness by core.rollout.image_check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.config.rollout import Rollout


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

    def judge(self, parity: Parity | None) -> str | None:
        """A warning, or None. Raises ParityError where the run must not go on."""
        if parity is None:
            return None
        self._pending = False
        said = complaint(parity, mean=self._rollout.parity_mean, most=self._rollout.parity_max)
        if said and self._rollout.parity == "stop":
            raise ParityError(said)
        return said


def measure(parts: Sequence[Any], version: int, exchange: Any) -> Parity | None:
    """Collective over the samples' ranks; None where the batch has no token of that version."""
    rows = []
    for part in parts:
        start = 0
        for sample in part.samples:
            end = start + len(sample.sampled_ids)
            same = np.asarray(sample.versions) == version
            if same.any():
                difference = (part.prox_R[start:end].float().cpu() - part.behave_R[start:end]).abs().numpy()[same]
                difference = np.where(np.isfinite(difference), difference, np.inf)
                rows.append((sample.sample_id, bool(sample.images), difference))
            start = end
    own = [
        (name, images, int(difference.size), float(difference.sum()), float(difference.max()))
        for name, images, difference in rows
    ]
    everywhere = {row[0]: row for some in exchange.gather(own) for row in some}
    return summary(list(everywhere.values()))


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


def complaint(parity: Parity, *, mean: float, most: float) -> str | None:
    """What is wrong and where to look, or None."""
    if parity.mean <= mean and parity.most <= most:
        return None
    if parity.bare_mean is not None and parity.bare_mean <= mean:
        cause = "answers without an image agree: look at how the server sees images (its processor, its vision cache)"
    elif parity.mean > 1:
        cause = "they share little: the server answers with other weights than it says, or another model"
    else:
        cause = "look at temperature and bans, the server's dtype and quantisation, raw against processed logprobs"
    return (
        f"the trainer's log-probabilities differ from the servers' by {parity.mean:.4f} in the mean and "
        f"{parity.most:.3f} at most over {parity.tokens} tokens of one version (allowed: rollout.parity_mean={mean:g}, "
        f"rollout.parity_max={most:g}); worst sample {parity.worst}. {cause}. "
        "To go on all the same: rollout.parity=warn"
    )
