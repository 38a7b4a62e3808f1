"""The order in which rows are used: a function of (seed, epoch), and of nothing that happened before.

Owns positions within epochs; knows neither rows nor prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np


@dataclass(frozen=True)
class Place:
    """The next prompt: its epoch and its position in that epoch, both counted from 0."""

    epoch: int
    position: int


@dataclass(frozen=True)
class Order:
    """Rows 0…rows-1, epoch by epoch. With `batch_size`, an epoch ends at the last whole batch (drop_last)."""

    rows: int
    seed: int
    shuffle: bool
    epochs: int
    batch_size: int | None = None

    @property
    def epoch_length(self) -> int:
        return self.rows if self.batch_size is None else self.rows // self.batch_size * self.batch_size

    def row(self, place: Place) -> int:
        """Number of the row at a place within the epoch's length."""
        if not 0 <= place.position < self.epoch_length:
            raise IndexError(place)
        if not self.shuffle:
            return place.position
        return int(_permutation(self.rows, self.seed, place.epoch)[place.position])

    def span(self, start: Place, count: int) -> list[Place]:
        """The next `count` places from `start`, over the ends of epochs; fewer at the end of the last one."""
        places: list[Place] = []
        at = self._carried(start)
        while at is not None and len(places) < count:
            places.append(at)
            at = self.after(at)
        return places

    def after(self, place: Place) -> Place | None:
        """The place that follows, None after the last epoch's last."""
        return self._carried(Place(place.epoch, place.position + 1))

    def _carried(self, place: Place) -> Place | None:
        if self.epoch_length == 0:
            return None
        over, position = divmod(place.position, self.epoch_length)
        epoch = place.epoch + over
        return Place(epoch, position) if epoch < self.epochs else None


@lru_cache(maxsize=4)
def _permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    # Sorted by raw words of the bit generator, whose stream numpy keeps across versions; ties go to the lower row.
    words = np.random.PCG64([seed, epoch]).random_raw(rows)
    return np.argsort(words, kind="stable")
