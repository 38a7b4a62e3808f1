"""Documents (prompt and answer with their images) into the packed batch that a model takes.

Owns the building of one micro-batch's tensors, every distinct image once, and of the empty batch that keeps ranks in
step; which documents go together is decided by core.engine.microbatch.
Shapes: T tokens of the stream, R scored tokens, M placeholder tokens, P patches, K values of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from core.data.images import patches
from core.data.mrope import Grid, mrope_position_ids
from core.engine.microbatch import Item
from core.ops.packed import PackedBatch, Scoring

PATCH_VALUES = 1176


class DocumentError(ValueError):
    """A document contradicts itself; the message names it."""


@dataclass(frozen=True)
class TokenRules:
    """What the model's tokens mean and under which distribution they are scored."""

    image_token_id: int | None
    video_token_id: int | None
    merge: int = 2
    tokens_per_second: float = 1.0
    temperature: float = 1.0
    ends: tuple[int, ...] = ()  # ids that end a sample: at -inf for its first min_new_tokens tokens
    min_new_tokens: int = 0

    @property
    def banned(self) -> tuple[int, ...]:
        """Placeholders are never sampled."""
        return tuple(i for i in (self.image_token_id, self.video_token_id) if i is not None)


@dataclass(frozen=True)
class Document:
    """Expanded ids, of which those from `prompt_length` on are scored."""

    name: str
    ids: NDArray[np.integer]
    prompt_length: int
    images: tuple[tuple[str, Grid], ...] = ()  # (content hash, grid in patches), in order of the placeholders
    group: str = ""

    @property
    def scored(self) -> int:
        return len(self.ids) - self.prompt_length

    def item(self) -> Item:
        """Its size, for packing."""
        return Item(len(self.ids), self.group, tuple((name, t * h * w) for name, (t, h, w) in self.images))


def pack_documents(
    documents: Sequence[Document],
    pixels: Mapping[str, NDArray[np.uint8]],
    rules: TokenRules,
    *,
    tower: bool,
    with_entropy: bool = False,
) -> PackedBatch:
    """One micro-batch. `tower`: some rank has an image here, so this one runs the tower too, on zeros if need be.

    Without documents it is the empty batch: one scored token, whose score the caller gives weight 0.
    """
    if not documents:
        documents = [Document("empty", np.zeros(2, dtype=np.int64), 1)]
    lengths = [len(document.ids) for document in documents]
    grids = {name: grid for document in documents for name, grid in document.images}
    pixel_values, grid_thw, rows = _visual(documents, grids, pixels, rules.merge) if grids else (None, (), None)
    if tower and pixel_values is None:
        pixel_values, grid_thw = torch.zeros(rules.merge**2, PATCH_VALUES), ((1, rules.merge, rules.merge),)
    return PackedBatch(
        input_ids_T=torch.from_numpy(np.concatenate([document.ids for document in documents]).astype(np.int64)),
        position_ids_3T=torch.from_numpy(np.concatenate([_positions(d, rules) for d in documents], axis=1)),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
        pixel_values_PK=pixel_values,
        grid_thw=grid_thw,
        image_names=tuple(grids),
        visual_row_M=rows,
        scoring=_scoring(documents, rules, with_entropy),
    )


def sample_numbers(documents: Sequence[Document]) -> torch.Tensor:
    """For each scored token the number of its document in the micro-batch."""
    counts = torch.tensor([document.scored for document in documents], dtype=torch.int64)
    return torch.repeat_interleave(torch.arange(len(documents)), counts)


def _positions(document: Document, rules: TokenRules) -> NDArray[np.int64]:
    try:
        return mrope_position_ids(
            document.ids,
            [grid for _, grid in document.images],
            image_token_id=rules.image_token_id,
            video_token_id=rules.video_token_id,
            merge=rules.merge,
            tokens_per_second=rules.tokens_per_second,
        )
    except ValueError as error:
        raise DocumentError(f"{document.name}: {error}") from error


def _visual(
    documents: Sequence[Document], grids: Mapping[str, Grid], pixels: Mapping[str, NDArray[np.uint8]], merge: int
) -> tuple[torch.Tensor, tuple[Grid, ...], torch.Tensor]:
    """Patches of every distinct image, their grids, and the tower's output row of every placeholder of the stream."""
    parts: list[NDArray[np.float32]] = []
    rows: dict[str, NDArray[np.int64]] = {}
    start = 0
    for name, (t, h, w) in grids.items():
        cut = patches(pixels[name])
        if len(cut) != t * h * w:
            raise DocumentError(f"image {name} gives {len(cut)} patches, its grid {t}x{h}x{w} says {t * h * w}")
        parts.append(cut)
        merged = t * h * w // merge**2
        rows[name] = np.arange(start, start + merged)
        start += merged
    stream = np.concatenate([rows[name] for document in documents for name, _ in document.images])
    return torch.from_numpy(np.concatenate(parts)), tuple(grids.values()), torch.from_numpy(stream)


def _scoring(documents: Sequence[Document], rules: TokenRules, with_entropy: bool) -> Scoring:
    rows, targets, early, start = [], [], [], 0
    for document in documents:
        if document.scored < 1 or document.prompt_length < 1:
            raise DocumentError(f"{document.name}: {document.prompt_length} prompt tokens, {document.scored} to score")
        rows.append(np.arange(document.prompt_length - 1, len(document.ids) - 1) + start)
        targets.append(document.ids[document.prompt_length :])
        early.append(np.arange(document.scored) < rules.min_new_tokens)
        start += len(document.ids)
    return Scoring(
        row_R=torch.from_numpy(np.concatenate(rows).astype(np.int64)),
        target_R=torch.from_numpy(np.concatenate(targets).astype(np.int64)),
        temperature=rules.temperature,
        banned=rules.banned,
        banned_early=rules.ends if rules.min_new_tokens else (),
        early_R=torch.from_numpy(np.concatenate(early)) if rules.min_new_tokens else None,
        with_entropy=with_entropy,
    )
