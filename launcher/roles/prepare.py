"""Every row of a configuration's datasets through the data service's own processing: lengths, sizes, bad rows.

Owns the pass over the rows and its statistics; bringing files here is launcher.commands.prepare's. Imports no torch.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from core.config import Config
from core.data.order import Order, Place
from core.data.service import Split
from launcher.planning.change import with_value
from launcher.planning.known import Prepared
from launcher.roles import data

_AT_ONCE = 64
QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)
MEASURES = ("pixels", "image_tokens", "prompt_tokens", "images_a_prompt")


@dataclass
class Measured:
    """One split: every bad row with its reason, and the numbers of the good ones."""

    split: str
    rows: int = 0
    bad: list[str] = field(default_factory=list)
    numbers: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in MEASURES})

    def add(self, prompt: dict[str, Any]) -> None:
        self.rows += 1
        if "error" in prompt:
            self.bad.append(prompt["error"])
            return
        self.numbers["images_a_prompt"].append(len(prompt["images"]))
        self.numbers["prompt_tokens"].append(len(prompt["expanded_ids"]))
        for image in prompt["images"]:
            self.numbers["pixels"].append(math.prod(image["original"]))
            self.numbers["image_tokens"].append(math.prod(image["grid_thw"]) // 4)

    def summary(self) -> Prepared:
        quantiles = {
            name: [float(each) for each in np.quantile(values, QUANTILES)]
            for name, values in self.numbers.items()
            if values
        }
        return Prepared(
            rows=self.rows,
            bad_rows=len(self.bad),
            max_prompt_tokens=max(self.numbers["prompt_tokens"], default=0),
            max_image_tokens=max(self.numbers["image_tokens"], default=0),
            max_images=max(self.numbers["images_a_prompt"], default=0),
            quantiles=quantiles,
        )


async def measure(config: Config, backend: str | None, on_progress: Callable[[str, int, int], None]) -> list[Measured]:
    """Processes every row of every split once; a bad row is recorded and the pass goes on."""
    # a set that holds less than a batch is plan's to refuse
    config = with_value(config, "train_dataset.batch_size", 1)
    with tempfile.TemporaryDirectory(prefix="prepare-") as scratch:
        service = data.make_service(config, backend, cache=Path(scratch), run_images=None)
        service.splits = {name: _whole(split) for name, split in service.splits.items()}
        try:
            return [await _measure_split(service, name, on_progress) for name in service.splits]
        finally:
            await service.close()


def _whole(split: Split) -> Split:
    """The same rows, each once and in their own order: drop_last leaves none out."""
    return Split(split.rows, Order(rows=len(split.rows), seed=0, shuffle=False, epochs=1), split.recipe)


async def _measure_split(
    service: data.DataService, name: str, on_progress: Callable[[str, int, int], None]
) -> Measured:
    measured = Measured(name)
    total = len(service.splits[name].rows)
    place: Place | None = Place(0, 0)
    while place is not None and measured.rows < total:
        prompts, place = await service.prompts(name, place, _AT_ONCE)
        for prompt in prompts:
            measured.add(prompt)
        on_progress(name, measured.rows, total)
    return measured
