"""Numbers of one batch, and the budget of failures in a row.

Owns arithmetic on groups; where the counts of a batch come from is the collector's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from core.rl.trajectory import Group
from core.rollout.admission import staleness


def batch_stats(groups: Sequence[Group], step: int) -> dict[str, Any]:
    samples = [sample for group in groups for sample in group.samples]
    rewards = np.array([sample.reward for sample in samples], np.float64)
    ages = [staleness(step, group.started_version) for group in groups]
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "accuracy": float(np.mean([sample.accuracy for sample in samples])),
        "staleness_mean": float(np.mean(ages)),
        "staleness_max": max(ages),
        "response_tokens_mean": float(np.mean([len(sample.sampled_ids) for sample in samples])),
        "truncated_fraction": float(np.mean([sample.truncated for sample in samples])),
        "equal_reward_groups": sum(len({sample.reward for sample in group.samples}) == 1 for group in groups),
        "restarts": sum(sample.restarts for sample in samples),
        "continuations": sum(sample.continuations for sample in samples),
        "groups": len(groups),
        "samples": len(samples),
    }


@dataclass
class FailureBudget:
    """The same failure `limit` times in a row ends a run; a success, or another failure, starts the count anew."""

    limit: int
    _streaks: dict[str, tuple[str, int, str]] = field(default_factory=dict)

    def failed(self, area: str, kind: str, traceback: str) -> str | None:
        """The first traceback of a streak that used the budget up, else None."""
        last, count, first = self._streaks.get(area, ("", 0, ""))
        if last != kind:
            count, first = 0, traceback
        self._streaks[area] = (kind, count + 1, first)
        return first if count + 1 >= self.limit else None

    def succeeded(self, area: str) -> None:
        self._streaks.pop(area, None)


@dataclass
class Tally:
    """Counts since the last batch."""

    tokens: int = 0
    void: dict[str, int] = field(default_factory=dict)
    reward_errors: dict[str, int] = field(default_factory=dict)

    def add(self, group: Group) -> None:
        for sample in group.samples:
            self.tokens += len(sample.sampled_ids)
            if sample.reward_error:
                kind = sample.reward_error.split(":", 1)[0]
                self.reward_errors[kind] = self.reward_errors.get(kind, 0) + 1

    def add_void(self, reason: str) -> None:
        self.void[reason] = self.void.get(reason, 0) + 1
