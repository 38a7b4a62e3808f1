"""The place in the data: behind the last prompt, too, so that more epochs go on there."""

from __future__ import annotations

import asyncio
from typing import Any

from core.data.order import Order, Place
from core.rollout.prompts import PromptSource


class Rows:
    """A data service of a few rows: its own order, and prompts that say where they are."""

    def __init__(self, epochs: int) -> None:
        self.order = Order(rows=3, seed=0, shuffle=False, epochs=epochs)

    async def get(self, path: str, *, split: str, epoch: int, position: int, n: int) -> dict[str, Any]:
        places = self.order.span(Place(epoch, position), n)
        after = self.order.after(places[-1]) if places else None
        following = None if after is None else {"epoch": after.epoch, "position": after.position}
        return {"prompts": [{"epoch": p.epoch, "position": p.position} for p in places], "next": following}


def read(epochs: int, cursor: dict[str, int]) -> tuple[list[tuple[int, int]], dict[str, int]]:
    """Every prompt from the cursor on, and the cursor behind the last of them."""

    async def all_of_them() -> tuple[list[tuple[int, int]], dict[str, int]]:
        source = PromptSource(Rows(epochs), "train", cursor, ahead=2)  # type: ignore[arg-type]
        found, behind = [], cursor
        while (pair := await source.next()) is not None:
            found.append((pair[0]["epoch"], pair[0]["position"]))
            behind = pair[1]
        assert source.exhausted()
        return found, behind

    return asyncio.run(asyncio.wait_for(all_of_them(), 10))


def test_a_run_that_saw_all_its_epochs_goes_on_in_the_next_one() -> None:
    first, behind = read(1, {"epoch": 0, "position": 0})
    assert first == [(0, 0), (0, 1), (0, 2)]
    assert read(1, behind) == ([], behind)
    assert read(2, behind)[0] == [(1, 0), (1, 1), (1, 2)]
