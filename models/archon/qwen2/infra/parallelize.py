"""What is done to a Qwen2Model before it trains: frozen tower, activation checkpointing, FSDP2.

Owns the order and the choice of units; how sharding works is core.parallel.fsdp. A model below ONE_UNIT_BELOW
parameters is one unit: there a collective per layer costs more than what it would save.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from core.parallel.fsdp import shard
from core.parallel.mesh import Mesh

ONE_UNIT_BELOW = 20_000_000

_SAVED_OPS = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._flash_attention_forward.default,
]


def parallelize(model: Any, mesh: Mesh, actor: Any, *, one_unit_below: int = ONE_UNIT_BELOW) -> None:
    """Prepares `model` (on meta or loaded) in place, as the section `actor` says."""
    if actor.freeze_vision and getattr(model, "visual", None) is not None:
        model.visual.requires_grad_(False)
    if actor.gradient_checkpointing:
        checkpoint_blocks(model, actor.archon.ac_mode, actor.archon.selective_ac_option)
    compute = getattr(torch, actor.dtype)
    if mesh.fsdp is None or (mesh.fsdp.size() == 1 and compute == master_dtype(compute)):
        return
    units = model.fsdp_units()
    if sum(p.numel() for p in model.parameters()) < one_unit_below:
        units = units[-1:]
    policy = actor.archon.reshard_after_forward_policy
    shard(
        model,
        units,
        mesh=mesh.fsdp,
        param_dtype=compute,
        reduce_dtype=getattr(torch, actor.grad_reduce_dtype),
        reshard_after_forward=policy != "never",
    )


def master_dtype(compute: torch.dtype) -> torch.dtype:
    """Of the weights that the optimizer moves: float32, or wider where the computation is."""
    return torch.promote_types(compute, torch.float32)


def checkpoint_blocks(model: Any, mode: str, option: str) -> None:
    """Recomputes each block in backward: `full`; `selective` keeps matmuls and attention ("op") or skips all but every
    N-th block ("2", "3", …)."""
    if mode == "none":
        return
    visual = getattr(model, "visual", None)
    blocks: list[nn.Module] = [*model.model.layers, *(visual.blocks if visual is not None else ())]
    every = int(option) if mode == "selective" and option != "op" else 1
    context: dict[str, Any] = {"context_fn": _saving_contexts} if mode == "selective" and option == "op" else {}
    for block in blocks[::every]:
        # the method is replaced, not the module wrapped: names of parameters stay those of the hub
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, early_stop=False, **context
        )


def _saving_contexts() -> Any:
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in _SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
