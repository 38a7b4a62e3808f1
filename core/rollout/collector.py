"""From prompts to batches: starts groups as admission allows, keeps their order, logs a batch before it is given out.

Owns the running groups and the progress (batches formed). Servers are the pool's, answers the workflow's, files the
journal's. Everything here runs on the service's event loop.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from core.config.generation import Generation as GenerationConfig
from core.rl.trajectory import Sample, group_id_of
from core.rollout.admission import Limits, capacity, staleness, within_staleness
from core.rollout.buffer import Buffer, Entry
from core.rollout.failures import Failures
from core.rollout.journal import Journal
from core.rollout.pool import ServerPool
from core.rollout.prompts import DataService, PromptSource
from core.rollout.statistics import batch_stats
from core.rollout.workflow import GroupVoidError, Prompt, Workflow
from core.telemetry.phases import announce

_SAMPLING_SECS = 0.05


class StalenessError(AssertionError):
    """A batch would hold a group older than max_head_offpolicyness: the program is wrong."""


@dataclass(frozen=True)
class Batch:
    samples: list[Sample]
    stats: dict[str, Any]


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
        before_group: Callable[[Prompt, Sequence[bytes]], Awaitable[None]] | None = None,
    ) -> None:
        self._limits = limits
        self._generation = generation
        self._drop_last = drop_last
        self._data = data
        self._pool = pool
        self._workflow = workflow
        self._journal = journal
        self._failures = failures
        self._before_group = before_group
        self._buffer = Buffer(limits.batch_size)
        self._source: PromptSource | None = None
        self._wake_admission = asyncio.Event()
        self._wake_forming = asyncio.Event()
        self._news = asyncio.Condition()
        self._running: set[asyncio.Task] = set()
        self._generating: set[str] = set()
        self._recent: OrderedDict[int, Batch] = OrderedDict()
        self._sampled = 0  # tokens of finished answers
        self._blocked_secs = 0.0
        self._blocked_at_last = 0.0
        self._busy_at_last = 0.0
        self._halted = False
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

    async def measure(self) -> None:
        """Until cancelled: how long servers idle because only the trainer can make room."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(_SAMPLING_SECS)
            now = time.monotonic()
            if self._waits_for_trainer():
                self._blocked_secs += now - last
            last = now

    def _waits_for_trainer(self) -> bool:
        served = self._pool.served()
        if not self.started or self.ended or served is None or not self._pool.idle():
            return False
        return within_staleness(self._limits, self._buffer.counts(), served) == 0

    async def batch(self, step: int, wait: float) -> Batch | None:
        """The batch, or None when it is not ready within `wait` seconds or will never be (see ended)."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait), self._news:
                await self._news.wait_for(lambda: self.ended or (self.started and self.formed >= step))
        # looked at after a timeout too: the last batch and the end may have come while the lock was waited for
        if step > self.formed:
            return None
        if step not in self._recent:
            samples, header = await asyncio.to_thread(self._journal.read_batch, step)
            self._remember(step, Batch(samples, header["stats"]))
        return self._recent[step]

    async def close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def status(self) -> dict[str, Any]:
        counts = self._buffer.counts()
        return {
            "batches": self.formed,
            "ended": self.ended,
            "consumed": counts.consumed,
            "ready": counts.ready,
            "running": counts.running,
            "wait_trainer_secs": round(self._blocked_secs, 3),
            **self._failures.status(),
            "restarts": self._workflow.interruptions.restarts,
            "continuations": self._workflow.interruptions.continuations,
            "server_errors": dict(self._workflow.interruptions.errors.most_common(5)),
        }

    async def _admit_some(self, source: PromptSource) -> bool:
        """False behind the last prompt that will ever be started."""
        while not self._halted and (served := self._pool.served()) is not None:
            if capacity(self._limits, self._buffer.counts(), served, self._servers_room()) == 0:
                total = self._limits.total_batches
                return total is None or self.formed < total
            taken = await source.next()
            if taken is None:
                return False
            self._start_group(*taken, served)
        return True

    def _servers_room(self) -> int | None:
        """Groups that wait for their rewards are none of the servers' business."""
        requests = self._pool.most_requests()
        if requests is None:
            return None
        return max(1, -(-requests // self._generation.n_samples)) - len(self._generating)

    def _start_group(self, prompt: dict[str, Any], cursor_after: dict[str, Any] | None, served: int) -> None:
        group_id = group_id_of(prompt["epoch"], prompt["position"])
        if (prompt["epoch"], prompt["position"]) in self._journal.void_places:
            return  # it was given up before this service was started
        if "error" in prompt:
            self._failures.void(group_id, prompt.get("prompt_id", ""), GroupVoidError("bad row", prompt["error"]))
            return
        entry = Entry(group_id, cursor_after, served)
        self._buffer.add(entry)
        self._generating.add(group_id)
        task = asyncio.create_task(self._run_group(entry, Prompt.from_json(prompt)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _run_group(self, entry: Entry, prompt: Prompt) -> None:
        try:
            names = [image.hash for image in prompt.images]
            entry.pngs = dict(zip(names, await asyncio.gather(*map(self._data.image, names)), strict=True))
            if self._before_group is not None:
                await self._before_group(prompt, [entry.pngs[name] for name in names])
            group = await self._workflow.run(
                prompt,
                [entry.pngs[name] for name in names],
                self._generation,
                n_samples=self._generation.n_samples,
                started_version=entry.started_version,
                generated=lambda: self._generated(entry.group_id),
            )
        except GroupVoidError as error:
            self._buffer.void(entry)
            self._failures.void(entry.group_id, prompt.prompt_id, error)
        except Exception as error:
            self._buffer.void(entry)
            kind = f"raised {type(error).__name__}"
            self._failures.void(
                entry.group_id, prompt.prompt_id, GroupVoidError(kind, str(error), traceback.format_exc())
            )
        else:
            self._buffer.finish(entry, group)
            self._failures.finished(group)
        self._wake_forming.set()
        self._generated(entry.group_id)

    def _generated(self, group_id: str) -> None:
        self._generating.discard(group_id)
        self._wake_admission.set()

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
        stats = {**batch_stats(groups, step), **self._interval_stats()}
        header = {"stats": stats, "cursor_after": entries[-1].cursor_after}
        pngs = {name: png for entry in entries for name, png in entry.pngs.items()}
        announce("logging a batch")
        await asyncio.to_thread(self._journal.write_batch, step, groups, header, pngs)
        announce("batch logged")
        self._remember(step, Batch([sample for group in groups for sample in group.samples], stats))
        self.formed = step
        self._wake_admission.set()
        async with self._news:
            self._news.notify_all()

    def _interval_stats(self) -> dict[str, Any]:
        """What happened since the last batch; the rate is that of all servers since the start, while they had work.

        Batches that were held back by the staleness bound are formed in one instant: a rate between two means nothing.
        """
        busy, tally = self._pool.busy_secs(), self._failures.take_tally()
        self._sampled += tally.tokens
        stats = {
            "rollout_tokens_per_s": self._sampled * max(1, len(self._pool.in_rotation())) / max(busy, 1e-9),
            "wait_trainer_secs": self._blocked_secs - self._blocked_at_last,
            "server_busy_secs": busy - self._busy_at_last,
            "void": tally.void,
            "reward_errors": tally.reward_errors,
        }
        self._busy_at_last, self._blocked_at_last = busy, self._blocked_secs
        return stats

    def _remember(self, step: int, batch: Batch) -> None:
        self._recent[step] = batch
        while len(self._recent) > self._limits.max_head_offpolicyness + 2:
            self._recent.popitem(last=False)
