"""From prompts to batches: admits groups as the bounds allow, keeps their order, logs a batch before it is given out.

Owns the progress (batches formed). Groups in flight are core.rollout.groups', servers the pool's, files the journal's.
Everything here runs on the service's event loop.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from core.config.generation import Generation as GenerationConfig
from core.rollout.admission import Limits, capacity, staleness, within_staleness
from core.rollout.batches import Batch, LoggedBatches
from core.rollout.buffer import Buffer
from core.rollout.failures import Failures
from core.rollout.groups import BeforeGroup, Groups
from core.rollout.journal import Journal
from core.rollout.pool import ServerPool
from core.rollout.prompts import DataService, PromptSource
from core.rollout.statistics import batch_stats
from core.rollout.waiting import Waiting
from core.rollout.workflow import Workflow
from core.telemetry.phases import announce


class StalenessError(AssertionError):
    """A batch would hold a group older than max_head_offpolicyness: the program is wrong."""


class Collector:
    def __init__(
        self,
        limits: Limits,
        generation: GenerationConfig,
        *,
        drop_last: bool,
        data: DataService,
        pool: ServerPool,
        workflow: Workflow,
        journal: Journal,
        failures: Failures,
        before_group: BeforeGroup | None = None,
    ) -> None:
        self._limits = limits
        self._drop_last = drop_last
        self._data = data
        self._pool = pool
        self._workflow = workflow
        self._journal = journal
        self._failures = failures
        self._buffer = Buffer(limits.batch_size)
        self._batches = LoggedBatches(journal, keep=limits.max_head_offpolicyness + 2)
        self._source: PromptSource | None = None
        self._wake_admission = asyncio.Event()
        self._wake_forming = asyncio.Event()
        self._news = asyncio.Condition()
        self._halted = False
        self._groups = Groups(
            self._buffer,
            generation,
            data=data,
            workflow=workflow,
            journal=journal,
            failures=failures,
            before_group=before_group,
            generated=self._wake_admission.set,
            ended=self._wake_forming.set,
        )
        self.waiting = Waiting(pool, self._within_staleness)
        self.formed = 0
        self.ended = False

    @property
    def started(self) -> bool:
        return self._source is not None

    def start(self, step: int) -> None:
        """Takes up the work behind the trainer's `step`: batches that are logged already are given out from disk."""
        self._journal.open()
        self.formed = self._journal.start_behind(step)
        for logged in range(step + 1, self.formed + 1):
            self._journal.restore_index(logged)
        cursor = self._journal.cursor_after(self.formed)
        self._buffer.consumed = self.formed * self._limits.batch_size
        self._source = PromptSource(self._data, "train", cursor, ahead=2 * self._limits.batch_size)
        print(f"rollout goes on behind batch {self.formed} (trainer at step {step}), data from {cursor}", flush=True)

    def halt(self) -> None:
        """Starts no more groups: the run has failed."""
        self._halted = True

    def wake(self) -> None:
        """Something changed that admission depends on."""
        self._wake_admission.set()

    async def admit(self) -> None:
        """Until cancelled, or the data's end: starts groups."""
        while not self.ended:
            self._wake_admission.clear()
            if self._source is not None and not await self._admit_some(self._source):
                break
            await self._wake_admission.wait()
        self._wake_forming.set()

    async def form(self) -> None:
        """Until the end: logs each batch as its last group is finished."""
        while not self.ended:
            self._wake_forming.clear()
            while (size := self._next_size()) > 0:
                await self._form_batch(size)
            self.ended = self._is_ended()
            if self.ended and self.formed == 0:
                self._failures.nothing_to_train()
            async with self._news:
                self._news.notify_all()
            if not self.ended:
                await self._wake_forming.wait()

    async def batch(self, step: int, wait: float) -> Batch | None:
        """The batch, or None when it is not ready within `wait` seconds or will never be (see ended)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait), self._news:
                await self._news.wait_for(lambda: self.ended or (self.started and self.formed >= step))
        # looked at after a timeout too: the last batch and the end may have come while the lock was waited for
        return await self._batches.get(step) if step <= self.formed else None

    async def close(self) -> None:
        await self._groups.close()

    def status(self) -> dict[str, Any]:
        counts = self._buffer.counts()
        return {
            "batches": self.formed,
            "ended": self.ended,
            "consumed": counts.consumed,
            "ready": counts.ready,
            "running": counts.running,
            "wait_trainer_secs": round(self.waiting.blocked_secs, 3),
            **self._failures.status(),
            "restarts": self._workflow.interruptions.restarts,
            "continuations": self._workflow.interruptions.continuations,
            "server_errors": dict(self._workflow.interruptions.errors.most_common(5)),
        }

    async def _admit_some(self, source: PromptSource) -> bool:
        """False behind the last prompt that will ever be started."""
        while not self._halted and (served := self._pool.served()) is not None:
            room = self._groups.room(self._pool.most_requests())
            if capacity(self._limits, self._buffer.counts(), served, room) == 0:
                total = self._limits.total_batches
                return total is None or self.formed < total
            taken = await source.next()
            if taken is None:
                return False
            self._groups.start(*taken, served)
        return True

    def _within_staleness(self, served: int) -> int | None:
        if not self.started or self.ended:
            return None
        return within_staleness(self._limits, self._buffer.counts(), served)

    def _next_size(self) -> int:
        """Groups of the batch that can be formed now; 0 when none can."""
        if self._limits.total_batches is not None and self.formed >= self._limits.total_batches:
            return 0
        if self._buffer.head_is_ready():
            return self._limits.batch_size
        left = len(self._buffer)
        whole_tail = not self._drop_last and self._no_more_prompts() and left < self._limits.batch_size
        return left if whole_tail and self._buffer.head_is_ready(left) else 0

    def _no_more_prompts(self) -> bool:
        return self._source is not None and self._source.exhausted()

    def _is_ended(self) -> bool:
        if self._limits.total_batches is not None and self.formed >= self._limits.total_batches:
            return True
        counts = self._buffer.counts()
        return self._no_more_prompts() and counts.running == 0 and counts.ready < self._limits.batch_size

    async def _form_batch(self, size: int) -> None:
        entries = self._buffer.take(size)
        groups = [entry.group for entry in entries if entry.group is not None]
        step = self.formed + 1
        oldest = max(staleness(step, group.started_version) for group in groups)
        if oldest > self._limits.max_head_offpolicyness:
            raise StalenessError(f"batch {step} holds a group of staleness {oldest}: the bound was not kept")
        stats = {**batch_stats(groups, step), **self.waiting.since_last(self._failures.take_tally())}
        header = {"stats": stats, "cursor_after": entries[-1].cursor_after}
        pngs = {name: png for entry in entries for name, png in entry.pngs.items()}
        announce("logging a batch")
        await asyncio.to_thread(self._journal.write_batch, step, groups, header, pngs)
        announce("batch logged")
        self._batches.remember(step, Batch([sample for group in groups for sample in group.samples], stats))
        self.formed = step
        self._wake_admission.set()
        async with self._news:
            self._news.notify_all()
