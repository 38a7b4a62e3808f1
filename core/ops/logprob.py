"""Log-probability and entropy of tokens under a linear head, in chunks, over a vocabulary that may be sharded.

Owns the distribution that the project trains and samples under: logits / temperature, with banned ids at -inf. Never
holds more than one chunk of logits; accumulates in float32, or in the input's dtype where that is wider.
Shapes: R rows, C rows of a chunk, D hidden, V this rank's vocabulary rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from core.ops.packed import Scores, Scoring
from core.parallel.collectives import copy, group_rank, group_size

CHUNK_ELEMENTS = 1 << 26  # logits of a chunk: 256 MiB in float32
BANNED = -1e30  # finite, so that 0 * logit stays 0


class TargetError(ValueError):
    """A target is outside the vocabulary."""


def segment_scores(
    hidden_RD: Tensor, weight_VD: Tensor, scoring: Scoring, *, tp: ProcessGroup | None = None, chunk: int | None = None
) -> Scores:
    """Scores of `scoring.target_R` under softmax(hidden @ weight.T / temperature) with the banned ids left out.

    Rows of the vocabulary are sharded over `tp` in rank order; every rank passes the same hidden and targets and gets
    the same scores (two all-reduces: maxima, then sums). Gradients flow through both scores. A banned target scores
    -inf. Raises TargetError for a target outside the vocabulary (on CUDA an asynchronous device assertion).
    """
    _check_targets(scoring.target_R, weight_VD.shape[0] * group_size(tp))
    hidden_RD = copy(hidden_RD, tp)
    chunk = chunk or max(1, CHUNK_ELEMENTS // max(1, weight_VD.shape[0]))
    first = group_rank(tp) * weight_VD.shape[0]
    distribution = _Distribution(scoring, first, weight_VD.shape[0], weight_VD.device, chunk)
    logp_R, entropy_R = _SegmentScores.apply(hidden_RD, weight_VD, distribution, tp)
    return Scores(logp_R, entropy_R if scoring.with_entropy else None)


class _Distribution:
    """Masked and tempered logits of a chunk of rows, for one shard of the vocabulary."""

    def __init__(self, scoring: Scoring, first: int, rows: int, device: torch.device, chunk: int) -> None:
        self.temperature = scoring.temperature
        self.with_entropy = scoring.with_entropy
        self.chunk = chunk
        self.rows = rows
        self.target_R = scoring.target_R - first
        self.banned = _local(scoring.banned, first, rows, device)
        self.banned_early = _local(scoring.banned_early, first, rows, device)
        self.early_R = scoring.early_R if scoring.banned_early else None

    def chunks(self) -> list[slice]:
        rows = self.target_R.shape[0]
        return [slice(start, min(start + self.chunk, rows)) for start in range(0, rows, self.chunk)]

    def logits(self, hidden_RD: Tensor, weight_VD: Tensor, at: slice) -> Tensor:
        logits_CV = _wide_matmul(hidden_RD[at], weight_VD.t())
        if self.temperature != 1.0:
            logits_CV.div_(self.temperature)
        if self.banned.numel():
            logits_CV.index_fill_(1, self.banned, BANNED)
        if self.early_R is not None and self.banned_early.numel():
            columns = logits_CV.index_select(1, self.banned_early)
            columns.masked_fill_(self.early_R[at, None], BANNED)
            logits_CV.index_copy_(1, self.banned_early, columns)
        return logits_CV

    def target(self, at: slice) -> tuple[Tensor, Tensor]:
        """Column of each target [C, 1], and whether it lies in this shard."""
        column_C1 = self.target_R[at, None]
        inside_C1 = (column_C1 >= 0) & (column_C1 < self.rows)
        return column_C1.clamp(0, self.rows - 1), inside_C1


class _SegmentScores(torch.autograd.Function):
    """Forward keeps per-row statistics only; backward recomputes each chunk's logits."""

    @staticmethod
    def forward(
        ctx: Any, hidden_RD: Tensor, weight_VD: Tensor, distribution: _Distribution, tp: ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        wide = _wide_dtype(hidden_RD)
        stats = hidden_RD.new_empty((4, hidden_RD.shape[0]), dtype=wide)
        max_R, sum_R, weighted_R, target_R = stats
        for at in distribution.chunks():
            logits_CV = distribution.logits(hidden_RD, weight_VD, at)
            column_C1, inside_C1 = distribution.target(at)
            target_R[at] = logits_CV.gather(1, column_C1).masked_fill(~inside_C1, 0.0).squeeze(1)
            max_R[at] = logits_CV.amax(1)
            logits_CV.sub_(max_R[at, None])
            exp_CV = logits_CV.exp()
            sum_R[at] = exp_CV.sum(1)
            if distribution.with_entropy:
                weighted_R[at] = exp_CV.mul_(logits_CV).sum(1)
        if not distribution.with_entropy:
            weighted_R.zero_()
        if group_size(tp) > 1:
            own_max_R = max_R.clone()
            dist.all_reduce(max_R, op=dist.ReduceOp.MAX, group=tp)
            shift_R = own_max_R - max_R
            weighted_R += shift_R * sum_R
            stats[1:3] *= shift_R.exp()
            dist.all_reduce(stats[1:], group=tp)
        # differences to the maximum first: logits may be large beside what is left of them
        logp_R = (target_R - max_R - sum_R.log()).masked_fill(target_R <= BANNED, -torch.inf)
        entropy_R = sum_R.log() - weighted_R / sum_R
        ctx.save_for_backward(hidden_RD, weight_VD, max_R + sum_R.log(), entropy_R)
        ctx.distribution = distribution
        ctx.set_materialize_grads(False)
        return logp_R, entropy_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_RD, weight_VD, lse_R, entropy_R = ctx.saved_tensors
        grad_logp_R, grad_entropy_R = grads
        distribution: _Distribution = ctx.distribution
        wide = lse_R.dtype
        hidden_grad = torch.zeros_like(hidden_RD) if ctx.needs_input_grad[0] else None
        weight_grad = torch.zeros_like(weight_VD, dtype=wide) if ctx.needs_input_grad[1] else None
        if grad_logp_R is None and grad_entropy_R is None:
            return None, None, None, None
        for at in distribution.chunks():
            logits_CV = distribution.logits(hidden_RD, weight_VD, at)
            grad_CV = _logits_grad(logits_CV, distribution, at, lse_R, entropy_R, grad_logp_R, grad_entropy_R)
            grad_CV = grad_CV.to(hidden_RD.dtype)
            if hidden_grad is not None:
                hidden_grad[at] = _wide_matmul(grad_CV, weight_VD.to(grad_CV.dtype)).to(hidden_RD.dtype)
            if weight_grad is not None:
                weight_grad += _wide_matmul(grad_CV.t(), hidden_RD[at])
        return hidden_grad, None if weight_grad is None else weight_grad.to(weight_VD.dtype), None, None


def _logits_grad(
    logits_CV: Tensor,
    distribution: _Distribution,
    at: slice,
    lse_R: Tensor,
    entropy_R: Tensor,
    grad_logp_R: Tensor | None,
    grad_entropy_R: Tensor | None,
) -> Tensor:
    """Gradient of a chunk's logits before temperature; overwrites `logits_CV`.

    d logp / d x_i = 1[i = target] - p_i and d H / d x_i = -p_i (log p_i + H); banned columns have p = 0.
    """
    logp_CV = logits_CV.sub_(lse_R[at, None])
    p_CV = logp_CV.exp()
    if grad_entropy_R is None:
        assert grad_logp_R is not None
        grad_CV = p_CV.mul_(-grad_logp_R[at, None])
    else:
        factor_CV = logp_CV.add_(entropy_R[at, None]).mul_(-grad_entropy_R[at, None])
        if grad_logp_R is not None:
            factor_CV.sub_(grad_logp_R[at, None])
        grad_CV = p_CV.mul_(factor_CV)
    if grad_logp_R is not None:
        column_C1, inside_C1 = distribution.target(at)
        grad_CV.scatter_add_(1, column_C1, (grad_logp_R[at, None] * inside_C1).to(grad_CV.dtype))
    if distribution.banned.numel():
        grad_CV.index_fill_(1, distribution.banned, 0.0)
    return grad_CV.div_(distribution.temperature) if distribution.temperature != 1.0 else grad_CV


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with products and sums in float32 or wider; half-precision tensor cores do that without a copy."""
    wide = torch.promote_types(_wide_dtype(a), b.dtype)
    if a.is_cuda and a.dtype == b.dtype and a.dtype != wide:
        return torch.mm(a, b, out_dtype=wide)
    return torch.mm(a.to(wide), b.to(wide))


def _local(ids: tuple[int, ...], first: int, rows: int, device: torch.device) -> Tensor:
    inside = sorted({i - first for i in ids if first <= i < first + rows})
    return torch.tensor(inside, dtype=torch.int64, device=device)


def _check_targets(target_R: Tensor, vocab_size: int) -> None:
    if target_R.numel() == 0:
        return
    fits = ((target_R >= 0) & (target_R < vocab_size)).all()
    if target_R.is_cuda:
        torch._assert_async(fits)
    elif not fits:
        raise TargetError(f"targets {target_R.min().item()}..{target_R.max().item()} leave [0, {vocab_size})")
