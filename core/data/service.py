"""The data service: prompts by place, and pictures by hash.

Stateless about progress: an answer depends on (split, epoch, position) alone. Owns the caches and the processing of
each row once; the order is core.data.order's, the meaning of a row core.data.prompts', decoding core.data.image_pool's.
"""

from __future__ import annotations

import asyncio
import io
import sys
import traceback
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.data import prompts
from core.data.image_pool import ImagePool
from core.data.image_store import ImageStore
from core.data.images import ImageError, decode_png
from core.data.order import Order, Place
from core.data.prompts import PictureFacts, Recipe, RowError
from core.data.rows import Rows, RowsError
from core.data.tokenizer import Tokenizer
from core.rpc.errors import RpcError
from core.rpc.service import Call, Service

ANSWER_SECS = 20.0  # after this a request for many prompts is answered with those that are ready
MOST_PROMPTS = 1024
MOST_AHEAD = 64
CACHED_ROWS = 16_384
MISTAUGHT = "mistaught"
_Key = tuple[str, int]


@dataclass(frozen=True)
class Split:
    """One split as it is served: its rows, their order, and what is made of them."""

    rows: Rows
    order: Order
    recipe: Recipe
    mistaught: Mapping[str, Any] | None = None  # probability and from_count of phase=mistaught


class DataService:
    """Prompts and pictures of the given splits, on one event loop."""

    def __init__(
        self,
        splits: Mapping[str, Split],
        tokenizer: Tokenizer,
        pool: ImagePool,
        store: ImageStore,
        *,
        batch_size: int,
        total_steps: int | None = None,
    ) -> None:
        self.splits = dict(splits)
        self.tokenizer = tokenizer
        self.pool = pool
        self.store = store
        self.batch_size = batch_size
        self.total_steps = total_steps
        self.bad_rows: dict[_Key, RowError] = {}
        self.rows_processed = 0
        self._prepared: OrderedDict[_Key, asyncio.Task[dict[str, Any]]] = OrderedDict()
        self._row_of: dict[str, _Key] = {}
        self._in_work = asyncio.Semaphore(4 * pool.workers)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="rows")

    def add_routes(self, service: Service) -> None:
        service.get("/prompts", self._get_prompts)
        service.get("/images/{hash}", self._get_image)
        service.get("/pixels/{hash}", self._get_pixels)
        service.get("/info", self._get_info)

    async def prompts(
        self, split: str, place: Place, count: int, *, phase: str | None = None
    ) -> tuple[list[dict[str, Any]], Place | None]:
        """Up to `count` prompts from a place, and the place after the last one (None at the end).

        A bad row is a prompt with "error" and "error_kind". Fewer than asked for come back when the rest takes long.
        """
        served = self.splits[split]
        places = served.order.span(place, count)
        if not places:
            return [], None
        tasks = [self._prepare(split, served.order.row(at)) for at in places]
        self._prefetch(split, places[-1], count)
        await asyncio.wait([tasks[0]])
        await asyncio.wait(tasks, timeout=ANSWER_SECS)
        found = []
        for at, task in zip(places, tasks, strict=True):
            if not task.done():
                break
            found.append(self._placed(split, at, task.result(), phase))
        return found, served.order.after(places[len(found) - 1])

    async def image(self, name: str) -> bytes | None:
        """PNG of a hash: from the store, or made again from the row that it was in."""
        png = await asyncio.to_thread(self.store.get, name)
        if png is None and name in self._row_of:
            key = self._row_of[name]
            self._prepared.pop(key, None)
            await self._prepare(*key)
            png = await asyncio.to_thread(self.store.get, name)
        return png

    def info(self) -> dict[str, Any]:
        """Rows of each split, and how long training goes on."""
        order = self.splits["train"].order
        batches = -(-order.epochs * order.epoch_length // self.batch_size)
        return {
            "rows": {name: len(split.rows) for name, split in self.splits.items()},
            "epochs": order.epochs,
            "batches_per_epoch": -(-order.epoch_length // self.batch_size),
            "total_batches": batches if self.total_steps is None else min(batches, self.total_steps),
        }

    def status(self) -> dict[str, Any]:
        return {
            "rows": self.info()["rows"],
            "rows_processed": self.rows_processed,
            "bad_rows": dict(Counter(error.kind for error in self.bad_rows.values())),
            "bad_row_messages": [str(error) for error in list(self.bad_rows.values())[-20:]],
            "image_workers": self.pool.pids(),
        }

    def metrics(self) -> dict[str, float]:
        kinds = Counter(error.kind for error in self.bad_rows.values())
        return {
            "data_rows_processed": self.rows_processed,
            "data_rows_bad": len(self.bad_rows),
            **{f"data_rows_bad_{kind}": count for kind, count in kinds.items()},
            "data_images_processed": self.pool.processed,
            "data_image_workers_killed": self.pool.killed,
            "data_image_write_errors": self.store.write_errors,
        }

    async def close(self) -> None:
        tasks = list(self._prepared.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.pool.close()
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _prepare(self, split: str, row: int) -> asyncio.Task[dict[str, Any]]:
        """The task that prepares a row; there is one for each row, however many ask."""
        key = (split, row)
        task = self._prepared.get(key)
        if task is None or task.cancelled():
            task = asyncio.create_task(self._process(key))
            self._prepared[key] = task
            if len(self._prepared) > CACHED_ROWS and next(iter(self._prepared.values())).done():
                self._prepared.popitem(last=False)
        self._prepared.move_to_end(key)
        return task

    def _prefetch(self, split: str, last: Place, count: int) -> None:
        order = self.splits[split].order
        after = order.after(last)
        for at in order.span(after, min(2 * count, MOST_AHEAD)) if after is not None else ():
            self._prepare(split, order.row(at))

    async def _process(self, key: _Key) -> dict[str, Any]:
        split, index = key
        served = self.splits[split]
        head = {"prompt_id": f"{split}-{index}", "row_index": index}
        async with self._in_work:
            try:
                columns = await self._columns(served.rows, index)
                pictures = await self._pictures(served, prompts.image_sources(columns), key)
                body = prompts.build(columns, pictures, self.tokenizer, served.recipe)
            except RowError as error:
                bad = RowError(error.kind, f"{served.rows.place(index)}: {error}")
            except Exception as error:  # one row, whatever is wrong with it, must not end the service
                traceback.print_exc()
                bad = RowError("unexpected", f"{served.rows.place(index)}: {type(error).__name__}: {error}")
            else:
                self.rows_processed += 1
                return head | body
        if key not in self.bad_rows:
            self.bad_rows[key] = bad
            print(f"bad row ({bad.kind}): {bad}", file=sys.stderr, flush=True)
        empty: dict[str, Any] = {"input_ids": [], "expanded_ids": [], "images": [], "row": {}, "prompt_text": ""}
        return head | empty | {"error": str(bad), "error_kind": bad.kind}

    async def _columns(self, rows: Rows, index: int) -> dict[str, Any]:
        try:
            row = await asyncio.get_running_loop().run_in_executor(self._reader, rows.__getitem__, index)
        except RowsError as error:
            raise RowError("unreadable", str(error)) from error
        return row.columns

    async def _pictures(self, served: Split, sources: Sequence[object], key: _Key) -> list[PictureFacts]:
        found = []
        for number, source in enumerate(sources):
            try:
                facts, png = await self.pool.process(
                    source,
                    min_pixels=served.recipe.min_pixels,
                    max_pixels=served.recipe.max_pixels,
                    root=served.rows.root,
                )
            except ImageError as error:
                raise RowError("image", f"image {number}: {error}") from error
            await asyncio.to_thread(self.store.put, facts.hash, png)
            self._row_of[facts.hash] = key
            found.append(facts)
        return found

    def _placed(self, split: str, at: Place, prepared: dict[str, Any], phase: str | None) -> dict[str, Any]:
        prompt = prepared | {"epoch": at.epoch, "position": at.position}
        served = self.splits[split]
        if phase == MISTAUGHT and served.mistaught is not None and "error" not in prompt:
            right = prompts.answer(prompt["row"])
            taught = prompts.mistaught(right, at, seed=served.order.seed, **served.mistaught)
            prompt["row"] = prompt["row"] | {"answer": taught}
            if served.recipe.with_answer:
                prompt["completion_ids"] = prompts.completion(taught, self.tokenizer)
        return prompt

    async def _get_prompts(self, call: Call) -> dict[str, Any]:
        split = call.query.get("split", "train")
        phase = call.query.get("phase") or None
        try:
            place = Place(int(call.query.get("epoch", 0)), int(call.query.get("position", 0)))
            count = int(call.query.get("n", 1))
        except ValueError:
            raise RpcError(400, "epoch, position and n must be whole numbers") from None
        if split not in self.splits:
            raise RpcError(404, f"no split {split!r}; there are {', '.join(self.splits)}")
        if min(place.epoch, place.position) < 0 or not 1 <= count <= MOST_PROMPTS:
            raise RpcError(400, f"epoch and position must be at least 0, and n from 1 to {MOST_PROMPTS}")
        if phase not in (None, MISTAUGHT):
            raise RpcError(400, f"no phase {phase!r}; there is {MISTAUGHT}")
        if phase == MISTAUGHT and self.splits[split].mistaught is None:
            raise RpcError(400, f"split {split!r} has no dataset_kwargs.mistaught")
        found, after = await self.prompts(split, place, count, phase=phase)
        following = None if after is None else {"epoch": after.epoch, "position": after.position}
        return {"prompts": found, "next": following}

    async def _get_image(self, call: Call) -> bytes:
        return await self._found(call.path["hash"])

    async def _get_pixels(self, call: Call) -> bytes:
        png = await self._found(call.path["hash"])
        return await asyncio.to_thread(_npy, png)

    async def _found(self, name: str) -> bytes:
        png = await self.image(name)
        if png is None:
            raise RpcError(404, f"no image {name[:64]!r} in this run")
        return png

    async def _get_info(self, call: Call) -> dict[str, Any]:
        return self.info()


def _npy(png: bytes) -> bytes:
    body = io.BytesIO()
    np.save(body, decode_png(png), allow_pickle=False)
    return body.getvalue()
