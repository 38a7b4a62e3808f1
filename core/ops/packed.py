"""The packed batch that every model of this project takes, and what it gives back.

Owns the types between engine, embedded server and model; knows no model and computes nothing.
Documents lie end to end in one stream: boundaries come from `cu_seqlens` only, never from position ids.
Shapes: T tokens of the stream, B documents, R rows asked for, V vocabulary, D hidden, H heads, d head width, P patches,
K values of a patch, M placeholder tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


class Scoring(NamedTuple):
    """What to score: row r of the stream predicts target r."""

    row_R: Tensor  # int64, positions in the stream whose NEXT token is the target
    target_R: Tensor  # int64 token ids
    temperature: float = 1.0
    banned: tuple[int, ...] = ()  # ids at -inf everywhere
    banned_early: tuple[int, ...] = ()  # ids that end a sample, at -inf where early_R
    early_R: Tensor | None = None  # bool
    with_entropy: bool = False


class Scores(NamedTuple):
    """Log-probability of each target and entropy of the masked, tempered distribution; float32 or wider."""

    logp_R: Tensor
    entropy_R: Tensor | None


class Output(NamedTuple):
    """Logits of the wanted rows, or scores where scoring was asked for."""

    logits_RV: Tensor | None
    scores: Scores | None


@dataclass(frozen=True)
class PackedBatch:
    """Documents end to end, with every distinct image of them once."""

    input_ids_T: Tensor  # int64, placeholders expanded
    position_ids_3T: Tensor  # int64, mrope axes t, h, w
    cu_seqlens: Tensor  # int32 [B+1]
    max_seqlen: int
    pixel_values_PK: Tensor | None = None
    grid_thw: tuple[tuple[int, int, int], ...] = ()  # per image or video of pixel_values_PK, in patches
    image_names: tuple[str, ...] = ()  # content hashes of grid_thw, where known: what a frozen tower's features go by
    visual_row_M: Tensor | None = None  # int64, row of the tower's output for placeholder m; None = in order
    logit_rows_R: Tensor | None = None  # rows whose logits are wanted when scoring is None; None = all
    scoring: Scoring | None = None

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch on `device`."""
        moved: dict[str, object] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                moved[field.name] = value.to(device, non_blocking=True)
        if self.scoring is not None:
            moved["scoring"] = self.scoring._replace(
                row_R=self.scoring.row_R.to(device, non_blocking=True),
                target_R=self.scoring.target_R.to(device, non_blocking=True),
                early_R=None if self.scoring.early_R is None else self.scoring.early_R.to(device, non_blocking=True),
            )
        return replace(self, **moved)  # type: ignore[arg-type]


class KVCache(Protocol):
    """Keys and values of earlier forwards, owned by the embedded engine."""

    def attend(self, layer: int, q_THd: Tensor, k_THd: Tensor, v_THd: Tensor) -> Tensor:
        """Appends k and v (kv heads) of this forward's tokens to `layer` and attends; returns o_THd."""
        ...


@runtime_checkable
class CausalVLM(Protocol):
    """All that the engine knows of a model."""

    def __call__(self, packed: PackedBatch, kv_cache: KVCache | None = None) -> Output: ...

    def fsdp_units(self) -> list[list[nn.Module]]:
        """Modules to shard together, inner units first; the unit of embedding, final norm and head last."""
        ...
