"""Batches that are logged: the newest in memory, every other one read back from the journal."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from core.rl.trajectory import Sample
from core.rollout.journal import Journal


@dataclass(frozen=True)
class Batch:
    samples: list[Sample]
    stats: dict[str, Any]


class LoggedBatches:
    """`keep`: how many stay in memory."""

    def __init__(self, journal: Journal, keep: int) -> None:
        self._journal = journal
        self._keep = keep
        self._recent: OrderedDict[int, Batch] = OrderedDict()

    def remember(self, step: int, batch: Batch) -> None:
        self._recent[step] = batch
        while len(self._recent) > self._keep:
            self._recent.popitem(last=False)

    async def get(self, step: int) -> Batch:
        """One that was logged, by this start of the service or an earlier one."""
        if step not in self._recent:
            samples, header = await asyncio.to_thread(self._journal.read_batch, step)
            self.remember(step, Batch(samples, header["stats"]))
        return self._recent[step]
