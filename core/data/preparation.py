"""Rows made into prompts, each once: read, pictures decoded in children and kept, ids counted, bad ones named.

Owns the tasks, what they gave, and the bad rows. In what order rows are wanted, and how prompts are served, is
core.data.service's business; decoding is core.data.image_pool's.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from core.data import prompts
from core.data.image_pool import ImagePool
from core.data.image_store import ImageStore
from core.data.images import ImageError
from core.data.order import Order
from core.data.prompts import Recipe, RowError
from core.data.rows import Rows, RowsError
from core.data.tokenizer import Tokenizer
from core.rl.trajectory import ImageRef

CACHED_ROWS = 16_384
Prepared = dict[str, Any]


@dataclass(frozen=True)
class Split:
    """One split as it is served: its rows, their order, and what is made of them."""

    rows: Rows
    order: Order
    recipe: Recipe
    mistaught: Mapping[str, Any] | None = None  # probability and from_count of phase=mistaught


class Preparation:
    """Prepared rows of any splits, on one event loop; the last CACHED_ROWS are kept."""

    def __init__(self, tokenizer: Tokenizer, pool: ImagePool, store: ImageStore) -> None:
        self.tokenizer = tokenizer
        self.pool = pool
        self.store = store
        self.bad_rows: dict[tuple[str, int], RowError] = {}
        self.rows_done = 0
        self.tasks: OrderedDict[tuple[str, int], asyncio.Task[Prepared]] = OrderedDict()
        self._row_of: dict[str, tuple[str, Split, int]] = {}  # by the hash of a picture
        self._in_work = asyncio.Semaphore(4 * pool.workers)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="rows")

    def start(self, name: str, split: Split, row: int) -> asyncio.Task[Prepared]:
        """The task that prepares a row; there is one for each row, however many ask.

        It gives the part of a prompt that does not depend on its place, with "error" and "error_kind" for a bad row.
        """
        key = (name, row)
        task = self.tasks.get(key)
        if task is None or task.cancelled():
            task = asyncio.create_task(self._process(name, split, row))
            self.tasks[key] = task
            if len(self.tasks) > CACHED_ROWS and next(iter(self.tasks.values())).done():
                self.tasks.popitem(last=False)
        self.tasks.move_to_end(key)
        return task

    async def picture(self, picture_hash: str) -> bytes | None:
        """PNG of a hash: from the store, or made again from the row that it was in."""
        png = await asyncio.to_thread(self.store.get, picture_hash)
        if png is None and picture_hash in self._row_of:
            name, split, row = self._row_of[picture_hash]
            self.tasks.pop((name, row), None)
            await self.start(name, split, row)
            png = await asyncio.to_thread(self.store.get, picture_hash)
        return png

    def bad_kinds(self) -> dict[str, int]:
        return dict(Counter(error.kind for error in self.bad_rows.values()))

    async def close(self) -> None:
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.pool.close()
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def _process(self, name: str, split: Split, row: int) -> Prepared:
        head = {"prompt_id": f"{name}-{row}", "row_index": row}
        async with self._in_work:
            try:
                columns = await self._columns(split.rows, row)
                pictures = await self._pictures(split.recipe, split.rows, prompts.image_sources(columns))
                self._row_of |= {picture.hash: (name, split, row) for picture in pictures}
                body = prompts.build(columns, pictures, self.tokenizer, split.recipe)
            except RowError as error:
                bad = RowError(error.kind, f"{split.rows.place(row)}: {error}")
            except Exception as error:  # one row, whatever is wrong with it, must not end the service
                traceback.print_exc()
                bad = RowError("unexpected", f"{split.rows.place(row)}: {type(error).__name__}: {error}")
            else:
                self.rows_done += 1
                return head | body
        if (name, row) not in self.bad_rows:
            self.bad_rows[name, row] = bad
            print(f"bad row ({bad.kind}): {bad}", file=sys.stderr, flush=True)
        empty: Prepared = {"input_ids": [], "expanded_ids": [], "images": [], "row": {}, "prompt_text": ""}
        return head | empty | {"error": str(bad), "error_kind": bad.kind}

    async def _columns(self, rows: Rows, row: int) -> dict[str, Any]:
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._reader, rows.__getitem__, row)
        except RowsError as error:
            raise RowError("unreadable", str(error)) from error
        return found.columns

    async def _pictures(self, recipe: Recipe, rows: Rows, sources: Sequence[object]) -> list[ImageRef]:
        found = []
        limits = {"min_pixels": recipe.min_pixels, "max_pixels": recipe.max_pixels}
        for number, source in enumerate(sources):
            try:
                facts, png = await self.pool.process(source, root=rows.root, **limits)
            except ImageError as error:
                raise RowError("image", f"image {number}: {error}") from error
            await asyncio.to_thread(self.store.put, facts.hash, png)
            found.append(facts)
        return found
