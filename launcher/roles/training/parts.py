"""A rank's samples of a step as micro-batches: fetched, built into tensors, scored.

Owns what a part is; what is done with its numbers is the step's (steps) and the gate's (passage).
Shapes: R loss tokens of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.engine.documents import Document, pack_documents, sample_numbers
from core.engine.microbatch import Packing
from core.engine.train_engine import Micro, TrainEngine
from core.ops.packed import PackedBatch, Scores
from core.rl.trajectory import Sample, decode_samples
from launcher.roles.training.setup import Session

SAMPLES_A_REQUEST = 512
KEPT_BATCH_BYTES = 256 << 20  # micro-batches of a step are built once where their pixels are fewer than this
Change = Callable[[PackedBatch], PackedBatch]


@dataclass
class Part:
    """This rank's samples of a micro-batch, and its tensors."""

    numbers: tuple[int, ...]
    samples: list[Sample]
    documents: list[Document]
    build: Callable[[], PackedBatch]
    prox_R: Tensor | None = None
    advantage_R: Tensor | None = None

    @cached_property
    def behave_R(self) -> Tensor:
        return torch.from_numpy(np.concatenate([sample.logprobs for sample in self.samples]))

    @cached_property
    def sample_R(self) -> Tensor:
        return sample_numbers(self.documents)

    def changed(self, change: Change) -> PackedBatch:
        return change(self.build())

    @property
    def micro(self) -> Micro:
        return Micro(self.build, empty=not self.samples)


def fetch_parts(packing: Packing, step: int, session: Session) -> list[list[Part]]:
    """This rank's samples and images, as micro-batches of each minibatch."""
    rank = session.mesh.dp_rank
    numbers = [i for minibatch in packing.minibatches for i in minibatch.samples_of(rank)]
    bodies, pixels = session.exchange.share(lambda: _ask(step, numbers, session))
    samples = dict(zip(numbers, (sample for body in bodies for sample in decode_samples(body)[0]), strict=True))
    # a pixel is in two frames, as float32
    keep = 8 * sum(image.nbytes for image in pixels.values()) <= KEPT_BATCH_BYTES
    return [
        [
            build_part(micro, samples, pixels, session, tower=tower, keep=keep)
            for micro, tower in zip(minibatch.ranks[rank], minibatch.tower, strict=True)
        ]
        for minibatch in packing.minibatches
    ]


def _ask(step: int, numbers: list[int], session: Session) -> tuple[list[bytes], dict[str, Any]]:
    """The samples of these numbers as they travel, and the pixels of their images."""
    bodies, images = [], []
    for start in range(0, len(numbers), SAMPLES_A_REQUEST):
        some = ",".join(map(str, numbers[start : start + SAMPLES_A_REQUEST]))
        bodies.append(session.services.get_bytes("rollout", f"/batches/{step}/samples", indices=some))
        images += [image.hash for sample in decode_samples(bodies[-1])[0] for image in sample.images]
    return bodies, session.pixels.get(images)


def build_part(
    numbers: tuple[int, ...],
    samples: dict[int, Sample],
    pixels: dict[str, Any],
    session: Session,
    *,
    tower: bool,
    keep: bool,
) -> Part:
    own = [samples[i] for i in numbers]
    documents = [
        Document(
            sample.sample_id,
            np.concatenate([sample.prompt_ids, sample.sampled_ids]),
            len(sample.prompt_ids),
            tuple((image.hash, image.grid_thw) for image in sample.images),
            sample.group_id,
        )
        for sample in own
    ]
    built: list[PackedBatch] = []

    def build() -> PackedBatch:
        if built:
            return built[0]
        batch = pack_documents(documents, pixels, session.rules, tower=tower)
        if keep:
            built.append(batch)
        return batch

    return Part(numbers, own, documents, build)


def score_parts(
    engine: TrainEngine, parts: Sequence[Part], session: Session, change: Change | None = None
) -> list[Scores]:
    """Collective: all ranks have as many parts. `change` is made to each batch as it is built."""
    micros = [
        Micro(part.build if change is None else partial(part.changed, change), empty=not part.samples) for part in parts
    ]
    return engine.score(micros, session.stop.check)
