"""Linear, embedding, norm and head modules whose weights are shards over a tensor-parallel group.

Owns where a weight is cut and which communication enters and leaves a cut region; models are written on these and never
communicate themselves. A group of None or of size 1 gives the plain module. Every parameter is empty until a checkpoint
is loaded; `shards(module)` tells a loader the cut of each. Words: a *region* is what lies between column-parallel and
row-parallel layers; a *block* of features is never cut (a head).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from core.ops.logprob import segment_scores
from core.ops.packed import Scores, Scoring
from core.parallel import collectives
from core.parallel.collectives import group_rank, group_size


class ShardError(ValueError):
    """Features do not divide among the ranks of a group."""


def shards(module: nn.Module) -> dict[str, tuple[int, ProcessGroup]]:
    """Dim and group of the cut for each sharded parameter below `module`, by its name; others are whole."""
    found: dict[str, tuple[int, ProcessGroup]] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        group = getattr(child, "tp", None)
        if group is None or group_size(group) == 1:
            continue
        for name, dim in getattr(child, "cut", {}).items():
            found[f"{prefix}.{name}" if prefix else name] = (dim, group)
    return found


def column_parallel(x: Tensor, *layers: ColumnParallelLinear) -> tuple[Tensor, ...]:
    """Outputs of several column-parallel layers on one input, which enters their region once."""
    entered = collectives.copy(x, layers[0].tp)
    return tuple(layer.project(entered) for layer in layers)


class ReplicatedLinear(nn.Module):
    """A linear layer that every rank holds whole."""

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class ColumnParallelLinear(nn.Module):
    """Rows of the weight (output features) are shared out; the output is this rank's features."""

    cut = {"weight": 0, "bias": 0}  # noqa: RUF012

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        blocks: int | None = None,
        tp: ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        own = _share(out_features, blocks or out_features, tp)
        self.weight = nn.Parameter(torch.empty(own, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(own, dtype=dtype)) if bias else None

    def project(self, entered: Tensor) -> Tensor:
        """The product alone, for an input that has entered the region."""
        return F.linear(entered, self.weight, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(collectives.copy(x, self.tp))


class RowParallelLinear(nn.Module):
    """Columns of the weight (input features) are shared out; the output is summed over the group. No bias."""

    cut = {"weight": 1}  # noqa: RUF012

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        blocks: int | None = None,
        tp: ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.tp = tp
        own = _share(in_features, blocks or in_features, tp)
        self.weight = nn.Parameter(torch.empty(out_features, own, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return collectives.reduce(F.linear(x, self.weight), self.tp)


class VocabParallelEmbedding(nn.Module):
    """Rows of the table (token ids) are shared out; every rank gets the whole embedding."""

    cut = {"weight": 0}  # noqa: RUF012

    def __init__(
        self, vocab_size: int, features: int, *, tp: ProcessGroup | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(_share(vocab_size, vocab_size, tp), features, dtype=dtype))

    def forward(self, ids_T: Tensor) -> Tensor:
        if group_size(self.tp) == 1:
            return F.embedding(ids_T, self.weight)
        rows = self.weight.shape[0]
        local_T = ids_T - group_rank(self.tp) * rows
        outside_T = (local_T < 0) | (local_T >= rows)
        x_TD = F.embedding(local_T.masked_fill(outside_T, 0), self.weight)
        return collectives.reduce(x_TD.masked_fill(outside_T[:, None], 0), self.tp)


class VocabParallelHead(nn.Module):
    """The projection onto the vocabulary, whose rows are shared out; scores without ever holding all logits.

    Its weight may be the embedding's (a tied model assigns it). One forward does all: a unit of FSDP sees one call.
    """

    cut = {"weight": 0}  # noqa: RUF012

    def __init__(
        self, features: int, vocab_size: int, *, tp: ProcessGroup | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.tp = tp
        self.weight = nn.Parameter(torch.empty(_share(vocab_size, vocab_size, tp), features, dtype=dtype))

    def forward(self, hidden_RD: Tensor, scoring: Scoring | None = None) -> Tensor | Scores:
        """Logits of the rows over the whole vocabulary, or their scores."""
        if scoring is not None:
            return segment_scores(hidden_RD, self.weight, scoring, tp=self.tp)
        local_RV = F.linear(collectives.copy(hidden_RD, self.tp), self.weight)
        return collectives.gather(local_RV, self.tp, dim=-1)


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32 or wider, rounded to the input's dtype BEFORE the weight, as the servers do."""

    def __init__(self, features: int, eps: float, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * F.rms_norm(wide, (x.shape[-1],), eps=self.eps).to(x.dtype)


def _share(features: int, blocks: int, group: ProcessGroup | None) -> int:
    ranks = group_size(group)
    if features % blocks or blocks % ranks:
        raise ShardError(f"{features} features in {blocks} blocks do not divide among {ranks} tensor-parallel ranks")
    return features // ranks
