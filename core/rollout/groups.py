"""Groups in flight: each from its admission to a finished or void entry of the buffer.

Owns their tasks. When one may be started is the collector's decision; answers and rewards are the workflow's.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from core.config.generation import Generation
from core.rl.trajectory import group_id_of
from core.rollout.buffer import Buffer, Entry
from core.rollout.failures import Failures
from core.rollout.journal import Journal
from core.rollout.prompts import DataService
from core.rollout.workflow import GroupVoidError, Prompt, Workflow

BeforeGroup = Callable[[Prompt, Sequence[bytes]], Awaitable[None]]


class Groups:
    """`generated()` is called when a group no longer needs a server, `ended()` when its entry is finished or void."""

    def __init__(
        self,
        buffer: Buffer,
        generation: Generation,
        *,
        data: DataService,
        workflow: Workflow,
        journal: Journal,
        failures: Failures,
        before_group: BeforeGroup | None,
        generated: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self._buffer = buffer
        self._generation = generation
        self._data = data
        self._workflow = workflow
        self._journal = journal
        self._failures = failures
        self._before_group = before_group
        self._generated = generated
        self._ended = ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._generating: set[str] = set()

    def start(self, prompt: dict[str, Any], cursor_after: dict[str, Any] | None, served: int) -> None:
        group_id = group_id_of(prompt["epoch"], prompt["position"])
        if (prompt["epoch"], prompt["position"]) in self._journal.void_places:
            return  # it was given up before this service was started
        if "error" in prompt:
            self._failures.void(group_id, prompt.get("prompt_id", ""), GroupVoidError("bad row", prompt["error"]))
            return
        entry = Entry(group_id, cursor_after, served)
        self._buffer.add(entry)
        self._generating.add(group_id)
        task = asyncio.create_task(self._run(entry, Prompt.from_json(prompt)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def room(self, requests: int | None) -> int | None:
        """How many more groups `requests` at a time allow; groups that wait for rewards are none of the servers'."""
        if requests is None:
            return None
        return max(1, -(-requests // self._generation.n_samples)) - len(self._generating)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, entry: Entry, prompt: Prompt) -> None:
        try:
            names = [image.hash for image in prompt.images]
            entry.pngs = dict(zip(names, await asyncio.gather(*map(self._data.image, names)), strict=True))
            pngs = [entry.pngs[name] for name in names]
            if self._before_group is not None:
                await self._before_group(prompt, pngs)
            group = await self._workflow.run(
                prompt,
                pngs,
                self._generation,
                n_samples=self._generation.n_samples,
                started_version=entry.started_version,
                generated=lambda: self._leave_servers(entry),
            )
        except GroupVoidError as error:
            self._void(entry, prompt, error)
        except Exception as error:
            reason = f"raised {type(error).__name__}"
            self._void(entry, prompt, GroupVoidError(reason, str(error), traceback.format_exc()))
        else:
            self._buffer.finish(entry, group)
            self._failures.finished(group)
        self._ended()
        self._leave_servers(entry)

    def _void(self, entry: Entry, prompt: Prompt, error: GroupVoidError) -> None:
        self._buffer.void(entry)
        self._failures.void(entry.group_id, prompt.prompt_id, error)

    def _leave_servers(self, entry: Entry) -> None:
        self._generating.discard(entry.group_id)
        self._generated()
