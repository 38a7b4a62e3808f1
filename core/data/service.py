"""The data service: prompts by place, and pictures by hash.

Stateless about progress: an answer depends on (split, epoch, position) alone. Owns the walk over places, prefetching
and the routes; what is made of a row, once, is core.data.preparation's business, the order core.data.order's.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from core.data import prompts
from core.data.image_pool import ImagePool
from core.data.image_store import ImageStore
from core.data.images import decode_png
from core.data.order import Place
from core.data.preparation import Preparation, Prepared, Split
from core.data.tokenizer import Tokenizer
from core.rpc.errors import RpcError
from core.rpc.service import Call, Service
from core.telemetry.phases import announce

__all__ = ["DataService", "Split"]

ANSWER_SECS = 20.0  # after this a request for many prompts is answered with those that are ready
MOST_PROMPTS = 1024
MOST_AHEAD = 64
MISTAUGHT = "mistaught"


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
        self.preparation = Preparation(tokenizer, pool, store)
        self.batch_size = batch_size
        self.total_steps = total_steps

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
        tasks = [self._start(split, at) for at in places]
        ahead = served.order.after(places[-1])
        for at in served.order.span(ahead, min(2 * count, MOST_AHEAD)) if ahead is not None else ():
            self._start(split, at)
        await asyncio.wait([tasks[0]])
        await asyncio.wait(tasks, timeout=ANSWER_SECS)
        found = []
        for at, task in zip(places, tasks, strict=True):
            if not task.done():
                break
            found.append(self._placed(split, at, task.result(), phase))
        return found, served.order.after(places[len(found) - 1])

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
            "rows_processed": self.preparation.rows_done,
            "bad_rows": self.preparation.bad_kinds(),
            "bad_row_messages": [str(error) for error in list(self.preparation.bad_rows.values())[-20:]],
            "image_workers": self.preparation.pool.pids(),
        }

    def metrics(self) -> dict[str, float]:
        done = self.preparation
        return {
            "data_rows_processed": done.rows_done,
            "data_rows_bad": len(done.bad_rows),
            **{f"data_rows_bad_{kind}": count for kind, count in done.bad_kinds().items()},
            "data_images_processed": done.pool.processed,
            "data_image_workers_killed": done.pool.killed,
            "data_image_write_errors": done.store.write_errors,
        }

    async def close(self) -> None:
        await self.preparation.close()

    def _start(self, split: str, at: Place) -> asyncio.Task[Prepared]:
        served = self.splits[split]
        return self.preparation.start(split, served, served.order.row(at))

    def _placed(self, split: str, at: Place, prepared: Prepared, phase: str | None) -> dict[str, Any]:
        prompt = prepared | {"epoch": at.epoch, "position": at.position}
        served = self.splits[split]
        if phase == MISTAUGHT and served.mistaught is not None and "error" not in prompt:
            right = prompts.answer(prompt["row"])
            taught = prompts.mistaught(right, at, seed=served.order.seed, **served.mistaught)
            prompt["row"] = prompt["row"] | {"answer": taught}
            if served.recipe.with_answer:
                prompt["completion_ids"] = prompts.completion(taught, self.preparation.tokenizer)
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
        announce("prompts")
        found, after = await self.prompts(split, place, count, phase=phase)
        following = None if after is None else {"epoch": after.epoch, "position": after.position}
        return {"prompts": found, "next": following}

    async def _get_image(self, call: Call) -> bytes:
        return await self._found(call.path["hash"])

    async def _get_pixels(self, call: Call) -> bytes:
        png = await self._found(call.path["hash"])
        return await asyncio.to_thread(_npy, png)

    async def _found(self, name: str) -> bytes:
        announce("images")
        png = await self.preparation.picture(name)
        if png is None:
            raise RpcError(404, f"no image {name[:64]!r} in this run")
        return png

    async def _get_info(self, call: Call) -> dict[str, Any]:
        return self.info()


def _npy(png: bytes) -> bytes:
    body = io.BytesIO()
    np.save(body, decode_png(png), allow_pickle=False)
    return body.getvalue()
