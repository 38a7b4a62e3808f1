"""Why servers and trainer disagree: the same tokens scored again under one mistake at a time.

Owns the mistakes that are tried and the words for the one that explains what the servers reported. It costs a dozen
forwards of a few micro-batches, and only where the gate is shut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from core.config.rollout import Rollout
from core.ops.packed import PackedBatch
from launcher.roles.training.parity import Parity, Rescore, measure
from launcher.roles.training.parts import Change

PARTS = 2
COLDEST, HOTTEST, LOOKS = 0.25, 4.0, 12
_GOLDEN = 0.618034


def explain(
    parity: Parity, parts: Sequence[Any], version: int, exchange: Any, rescore: Rescore, limits: Rollout
) -> str:
    """Collective. What is wrong by how much, and the cause where one of the mistakes explains it."""
    told = (
        f"the trainer's log-probabilities differ from the servers' by {parity.mean:.4f} in the mean and "
        f"{parity.most:.3f} at most over {parity.tokens} tokens of version {version} (allowed: "
        f"rollout.parity_mean={limits.parity_mean:g}, rollout.parity_max={limits.parity_max:g}); "
        f"worst sample {parity.worst}"
    )
    if parity.mean <= limits.parity_mean and parity.image_effect == 0.0:
        return "the trainer's log-probabilities are the same with grey images: it does not see them, nor do the servers"
    some = list(parts[:PARTS])

    def mean(change: Change) -> float | None:
        found = measure(some, rescore(some, change), version, exchange)
        return None if found is None else found.mean

    before = mean(lambda batch: batch)
    if before is None:  # the first micro-batches have no token of this version
        some = list(parts)
        before = mean(lambda batch: batch) or parity.mean
    tried = {cause: found for cause, change in _mistakes() if (found := mean(change)) is not None}
    temperature, found = _nearest_temperature(mean)
    tried[f"the servers sample at temperature {temperature:.2f}, the trainer scores at another"] = found
    return f"{told}. {verdict(before, tried, limits.parity_mean, parity.bare_mean)}"


def verdict(before: float, tried: dict[str, float], allowed: float, bare_mean: float | None) -> str:
    """In words: the mistake under which the two agree, else what is left."""
    cause, least = min(tried.items(), key=lambda item: item[1])
    if least <= max(allowed, before / 10):
        return f"Cause: {cause} (so scored, they differ by {least:.4f})"
    if bare_mean is not None and bare_mean <= allowed:
        return "Cause: answers without an image agree: the servers see other images (their processor, a stale cache)"
    said = ", ".join(f"{found:.2f}: {mistake}" for mistake, found in tried.items())
    return (
        "Cause: neither temperature nor bans explain it: the servers answer with other weights than they say, see "
        f"other images, or run another model or precision (differences, were it so: {said})"
    )


def _mistakes() -> list[tuple[str, Change]]:
    return [
        (
            "the servers report raw log-probabilities, before temperature and bans "
            "(vLLM: --logprobs-mode processed_logprobs)",
            _scored(temperature=1.0, banned=(), banned_early=(), early_R=None),
        ),
        (
            "the servers leave in what the run bans (placeholder ids, and before gconfig.min_new_tokens the ids that "
            "end a sample)",
            _scored(banned=(), banned_early=(), early_R=None),
        ),
    ]


def _scored(**changes: Any) -> Change:
    def change(batch: PackedBatch) -> PackedBatch:
        assert batch.scoring is not None
        return replace(batch, scoring=batch.scoring._replace(**changes))

    return change


def _nearest_temperature(mean: Callable[[Change], float | None]) -> tuple[float, float]:
    """By golden sections of its logarithm: the difference has one valley."""

    def at(power: float) -> float:
        found = mean(_scored(temperature=COLDEST * (HOTTEST / COLDEST) ** power))
        assert found is not None
        return found

    low, high = 0.0, 1.0
    inner = [high - _GOLDEN, low + _GOLDEN]
    values = [at(power) for power in inner]
    for _ in range(LOOKS - 2):
        if values[0] <= values[1]:
            high, inner[1], values[1] = inner[1], inner[0], values[0]
            inner[0] = high - _GOLDEN * (high - low)
            values[0] = at(inner[0])
        else:
            low, inner[0], values[0] = inner[0], inner[1], values[1]
            inner[1] = low + _GOLDEN * (high - low)
            values[1] = at(inner[1])
    best = min(range(2), key=values.__getitem__)
    return COLDEST * (HOTTEST / COLDEST) ** inner[best], values[best]
