"""Copies, gathers and scatters with gradients, over a group that the caller passes.

Owns the pairs of communication that tensor parallelism needs, in Megatron's words; holds no group and no parameter.
A group of None or of size 1 makes each of them the identity.

| call           | forward        | backward       |
| copy           | identity       | all-reduce     |
| gather         | all-gather     | take own slice |
| gather_sum     | all-gather     | reduce-scatter |
| reduce_scatter | reduce-scatter | all-gather     |
| swap           | all-to-all     | all-to-all     |
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from core.parallel.torch_api import all_gather_single, reduce_scatter_single


def group_size(group: ProcessGroup | None) -> int:
    """Ranks of the group; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """This process's rank in the group; 0 for None."""
    return 0 if group is None else group.rank()


def copy(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The same values on every rank of the group; their gradients add up."""
    return x if group_size(group) == 1 else _apply(_Copy, x, group)


def gather(x: Tensor, group: ProcessGroup | None, dim: int = -1) -> Tensor:
    """Slices of all ranks side by side along `dim`, used in the same way by every rank."""
    return x if group_size(group) == 1 else _apply(_Gather, x, group, dim)


def gather_sum(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> Tensor:
    """Slices of all ranks side by side, used differently by each rank: their gradients add up."""
    return x if group_size(group) == 1 else _apply(_GatherSum, x, group, dim)


def reduce_scatter(x: Tensor, group: ProcessGroup | None, dim: int = 0) -> Tensor:
    """This rank's slice along `dim` of the sum of every rank's partial values."""
    return x if group_size(group) == 1 else _apply(_ReduceScatter, x, group, dim)


def swap(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Row r of the first dim goes to rank r of the group; row r of the result came from it."""
    return x if group_size(group) == 1 else _apply(_Swap, x, group)


@torch.compiler.disable  # a compiled block is cut here
def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    return function.apply(*arguments)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0], ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _concatenate(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _own_slice(grads[0], ctx.group, ctx.dim), None, None


class _GatherSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _concatenate(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _sum_slice(grads[0], ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _sum_slice(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _concatenate(grads[0], ctx.group, ctx.dim), None, None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _swapped(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _swapped(grads[0], ctx.group), None


def _swapped(x: Tensor, group: ProcessGroup) -> Tensor:
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    return received


def _sum(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _own_slice(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    if x.shape[dim] % group.size():
        raise ValueError(f"dim {dim} of {tuple(x.shape)} does not divide among {group.size()} ranks")
    return x.chunk(group.size(), dim=dim)[group.rank()].contiguous()


def _concatenate(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    ranks = group.size()
    found = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    all_gather_single(found, x.contiguous(), group=group)
    return found if dim == 0 else torch.cat(found.chunk(ranks), dim=dim)


def _sum_slice(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    if x.shape[dim] % group.size():
        raise ValueError(f"dim {dim} of {tuple(x.shape)} does not divide among {group.size()} ranks")
    stacked = x if dim == 0 else torch.cat(x.chunk(group.size(), dim=dim))
    own = stacked.new_empty((stacked.shape[0] // group.size(), *stacked.shape[1:]))
    reduce_scatter_single(own, stacked.contiguous(), group=group)
    return own
