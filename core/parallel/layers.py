"""Linear, embedding, norm and head modules whose weights are shards over a tensor-parallel mesh.

Owns where a weight is cut and which communication enters and leaves a cut region; models are written on these and never
communicate themselves. A mesh of None gives the plain module; else every weight is a DTensor on it, so that norms and
checkpoints see one model. Every parameter is empty until a checkpoint is loaded. Words: a *region* is what lies between
column-parallel and row-parallel layers; a *block* of features is never cut (a head).

Sequence parallel: outside a region each rank has its own rows of the stream (S of N). Entering gathers rows, leaving
sums and scatters them, so a weight that is whole on every rank sees some of the rows only and its gradient is a part:
`sum_partial_gradients` adds them up, once per optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from core.ops.logprob import segment_scores
from core.ops.packed import Scores, Scoring
from core.parallel import collectives


class ShardError(ValueError):
    """Features do not divide among the ranks of a mesh."""


def column_parallel(x_SD: Tensor, *layers: ColumnParallelLinear) -> tuple[Tensor, ...]:
    """Outputs of several column-parallel layers on one input, whose rows enter their region once."""
    entered_ND = collectives.gather_sum(x_SD, layers[0].group)
    return tuple(layer.project(entered_ND) for layer in layers)


def local(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter, differentiable."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def replicate(module: nn.Module, tp: DeviceMesh | None) -> None:
    """Puts every parameter below `module` that is not cut whole onto the mesh."""
    if tp is None:
        return
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                whole = DTensor.from_local(parameter.detach(), tp, [Replicate()], run_check=False)
                setattr(child, name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


@torch.no_grad()
def sum_partial_gradients(parameters: Iterable[nn.Parameter], tp: DeviceMesh | None) -> None:
    """Adds up over `tp` the gradients of weights that are whole on each of its ranks."""
    if tp is None:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor) and isinstance(parameter.placements[-1], Replicate):
            part = None if parameter.grad is None else local(parameter.grad)
            if part is not None and part.numel():
                by_dtype.setdefault(part.dtype, []).append(part)
    for parts in by_dtype.values():
        flat = torch.cat([part.flatten() for part in parts])
        dist.all_reduce(flat, group=tp.get_group())
        for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(total.view_as(part))


class ReplicatedLinear(nn.Module):
    """A linear layer that every rank holds whole."""

    def __init__(self, in_features: int, out_features: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, local(self.weight), local(self.bias))


class ColumnParallelLinear(nn.Module):
    """Rows of the weight (output features) are shared out; the output is this rank's features.

    With more ranks than blocks every rank holds the whole weight and uses the block that its neighbours use too.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        blocks: int | None = None,
        tp: DeviceMesh | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group = _group(tp)
        self.own: slice | None = None
        blocks, ranks = blocks or out_features, 1 if tp is None else tp.size()
        shared = blocks < ranks and ranks % blocks == 0 and out_features % blocks == 0
        if shared:
            block = collectives.group_rank(self.group) * blocks // ranks
            self.own = slice(block * out_features // blocks, (block + 1) * out_features // blocks)
        else:
            _check(out_features, blocks, tp)
        dim = None if shared else 0
        self.weight = _parameter((out_features, in_features), dim, tp, dtype)
        self.bias = _parameter((out_features,), dim, tp, dtype) if bias else None

    def project(self, entered_ND: Tensor) -> Tensor:
        """The product alone, for an input that has entered the region."""
        weight, bias = local(self.weight), None if self.bias is None else local(self.bias)
        if self.own is not None:
            weight, bias = weight[self.own], None if bias is None else bias[self.own]
        return F.linear(entered_ND, weight, bias)

    def forward(self, x_SD: Tensor) -> Tensor:
        return column_parallel(x_SD, self)[0]


class RowParallelLinear(nn.Module):
    """Columns of the weight (input features) are shared out; of the sum each rank gets its rows. No bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        blocks: int | None = None,
        tp: DeviceMesh | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group = _group(tp)
        _check(in_features, blocks or in_features, tp)
        self.weight = _parameter((out_features, in_features), 1, tp, dtype)

    def forward(self, x_NF: Tensor) -> Tensor:
        return collectives.reduce_scatter(F.linear(x_NF, local(self.weight)), self.group)


class VocabParallelEmbedding(nn.Module):
    """Rows of the table (token ids) are shared out; every rank gets the embeddings of its rows of the stream."""

    def __init__(
        self, vocab_size: int, features: int, *, tp: DeviceMesh | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.group = _group(tp)
        _check(vocab_size, vocab_size, tp)
        self.weight = _parameter((vocab_size, features), 0, tp, dtype)

    def forward(self, ids_N: Tensor) -> Tensor:
        weight_VD = local(self.weight)
        if self.group is None:
            return F.embedding(ids_N, weight_VD)
        rows = weight_VD.shape[0]
        local_N = ids_N - self.group.rank() * rows
        outside_N = (local_N < 0) | (local_N >= rows)
        x_ND = F.embedding(local_N.masked_fill(outside_N, 0), weight_VD)
        return collectives.reduce_scatter(x_ND.masked_fill(outside_N[:, None], 0), self.group)


class VocabParallelHead(nn.Module):
    """The projection onto the vocabulary, whose rows are shared out; scores without ever holding all logits.

    Its input is the same on every rank. Its weight may be the embedding's (a tied model assigns it). One forward does
    all: a unit of FSDP sees one call.
    """

    def __init__(
        self, features: int, vocab_size: int, *, tp: DeviceMesh | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.group = _group(tp)
        _check(vocab_size, vocab_size, tp)
        self.weight = _parameter((vocab_size, features), 0, tp, dtype)

    def forward(self, hidden_RD: Tensor, scoring: Scoring | None = None) -> Tensor | Scores:
        """Logits of the rows over the whole vocabulary, or their scores."""
        weight_VD = local(self.weight)
        if scoring is not None:
            return segment_scores(hidden_RD, weight_VD, scoring, tp=self.group)
        local_RV = F.linear(collectives.copy(hidden_RD, self.group), weight_VD)
        return collectives.gather(local_RV, self.group, dim=-1)


class RMSNorm(nn.Module):
    """Root-mean-square norm in float32 or wider, rounded to the input's dtype BEFORE the weight, as the servers do."""

    def __init__(self, features: int, eps: float, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(features, dtype=dtype))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return local(self.weight) * F.rms_norm(wide, (x.shape[-1],), eps=self.eps).to(x.dtype)


def _group(tp: DeviceMesh | None) -> dist.ProcessGroup | None:
    return None if tp is None else tp.get_group()


def _check(features: int, blocks: int, tp: DeviceMesh | None) -> None:
    ranks = 1 if tp is None else tp.size()
    if features % blocks or blocks % ranks:
        raise ShardError(f"{features} features in {blocks} blocks do not divide among {ranks} tensor-parallel ranks")


def _parameter(
    shape: tuple[int, ...], dim: int | None, tp: DeviceMesh | None, dtype: torch.dtype | None
) -> nn.Parameter:
    """An empty parameter of a whole `shape`, cut along `dim` over the mesh (None: not cut)."""
    if tp is None:
        return nn.Parameter(torch.empty(shape, dtype=dtype))
    own = tuple(size // tp.size() if i == dim else size for i, size in enumerate(shape))
    placement = Replicate() if dim is None else Shard(dim)
    return nn.Parameter(DTensor.from_local(torch.empty(own, dtype=dtype), tp, [placement], run_check=False))
