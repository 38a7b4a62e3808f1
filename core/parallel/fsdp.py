"""FSDP2 over units that the model names: sharded float32 masters, compute in `param_dtype`, reduction by plain sum.

Owns sharding and the gathering of whole tensors; names no layer. The last unit (embedding, final norm, head) belongs to
the root: it stays gathered from the first use of a tied weight to its last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def shard(
    model: nn.Module,
    units: list[list[nn.Module]],
    *,
    mesh: DeviceMesh,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    reshard_after_forward: bool,
    whole: Iterable[nn.Parameter] = (),
) -> None:
    """Shards each unit but the last, then the rest of the model as the root unit; `whole` parameters stay as they are.

    Gradients are summed, never averaged: the loss carries the one global scale.
    """
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for unit in units[:-1]:
        fully_shard(
            unit if len(unit) > 1 else unit[0],
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
        )
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=set(whole))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo has no PREMUL_SUM: a factor of 1 alone would ask for it
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """The rank that writes each tensor: largest first, each to the rank with the least so far."""
    load = [0] * ranks
    out = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        out[name] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[out[name]] += sizes[name]
    return out


@torch.no_grad()
def gather_whole(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every parameter whole and in `dtype`, one FSDP unit gathered at a time; all ranks must exhaust it together.

    The tensor may be a view of a buffer that is freed after the next step of the iteration: copy what is kept.
    """
    for unit, names in _units(model).items():
        if unit is not None:
            unit.unshard()
        try:
            for name in names:
                found = model.get_parameter(name).detach()
                yield name, (found.full_tensor() if isinstance(found, DTensor) else found).to(dtype)
        finally:
            if unit is not None:
                unit.reshard()


def _units(model: nn.Module) -> dict[FSDPModule | None, list[str]]:
    """Parameter names by the FSDP unit that gathers them (None: not sharded)."""
    found: dict[FSDPModule | None, list[str]] = {}
    modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    for name, _ in model.named_parameters():
        holders = [prefix for prefix in modules if prefix == "" or name.startswith(prefix + ".")]
        unit = modules[max(holders, key=len)] if holders else None
        found.setdefault(unit, []).append(name)
    return found
