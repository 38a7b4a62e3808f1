"""Void groups and failed rewards: listed, counted by kind, and the end of a run when they do not stop.

Owns the counts, the void lines and the budget; what a failure is was decided where it happened (workflow, rewards).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from core.rl.trajectory import Group
from core.rollout.journal import Journal
from core.rollout.statistics import FailureBudget, Tally
from core.rollout.workflow import GroupVoidError

_REMEMBERED_VOIDS = 20


class Failures:
    """`fatal(message, first traceback)` is called when the budget is used up."""

    def __init__(self, budget: FailureBudget, journal: Journal, fatal: Callable[[str, str], None]) -> None:
        self._budget = budget
        self._journal = journal
        self._fatal = fatal
        self._tally = Tally()
        self.voids: dict[str, int] = {}
        self.last_voids: list[dict[str, Any]] = []
        self.reward_errors: dict[str, int] = {}

    def take_tally(self) -> Tally:
        """What was counted since the last call."""
        tally, self._tally = self._tally, Tally()
        return tally

    def finished(self, group: Group) -> None:
        """A group came through. One whose every reward failed in the same way counts as one failed reward: a bad row
        alone does not end a run."""
        self._budget.succeeded("generation")
        self._tally.add(group)
        errors = [sample.reward_error for sample in group.samples]
        kinds = {error.split(":", 1)[0] if error else None for error in errors}
        for error in filter(None, errors):
            self._count_reward(error)
        if len(kinds) > 1 or None in kinds:
            self._budget.succeeded("reward")
            return
        kind = str(kinds.pop())
        first = self._budget.failed("reward", kind, errors[0] or kind)
        if first is not None:
            self._fatal(f"the rewards of {self._budget.limit} groups in a row failed: {kind}", first)

    def void(self, group_id: str, prompt_id: str, error: GroupVoidError) -> None:
        epoch, position = (int(part) for part in group_id.split("-"))
        record = {
            "time": time.time(),
            "group_id": group_id,
            "epoch": epoch,
            "position": position,
            "prompt_id": prompt_id,
            "reason": error.reason,
            "message": error.message,
        }
        print(f"void group {group_id} ({prompt_id}): {error.reason}: {error.message}", file=sys.stderr, flush=True)
        self._journal.write_void(record)
        self._tally.add_void(error.reason)
        self.voids[error.reason] = self.voids.get(error.reason, 0) + 1
        self.last_voids = [*self.last_voids, record][-_REMEMBERED_VOIDS:]
        first = self._budget.failed("generation", error.reason, error.traceback)
        if first is not None:
            self._fatal(f"{self._budget.limit} groups in a row void: {error.reason}: {error.message}", first)

    def nothing_to_train(self) -> None:
        """The data ended before a batch was whole: that is no run that is done."""
        last = self.last_voids[-1]["message"] if self.last_voids else ""
        listed = ", ".join(f"{count} void ({reason})" for reason, count in self.voids.items()) or "too few prompts"
        self._fatal(f"the data ended before the first batch was whole: {listed}", last)

    def status(self) -> dict[str, Any]:
        return {"void": self.voids, "last_voids": self.last_voids, "reward_errors": self.reward_errors}

    def _count_reward(self, error: str) -> None:
        kind = error.split(":", 1)[0]
        if kind not in self.reward_errors:
            print(f"first reward error of kind {kind}: {error}", file=sys.stderr, flush=True)
        self.reward_errors[kind] = self.reward_errors.get(kind, 0) + 1
