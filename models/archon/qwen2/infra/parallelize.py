"""What is done to a Qwen2Model before it trains: frozen tower, compiled and recomputed blocks, FSDP2.

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
from models.archon.qwen2.model.vision import Features

ONE_UNIT_BELOW = 20_000_000
# All blocks share one cache of compiled functions: by kind of block, range of lengths, and with gradients or without. A
# GRPO step of the 3B shape needs 11 (seen); beyond dynamo's limit of 8 a block runs eagerly, with one warning.
COMPILED_VARIANTS = 64

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
    """Prepares `model`, built on meta for the team of `mesh`, in place, as the section `actor` says."""
    compute = getattr(torch, actor.dtype)
    tower: Any = getattr(model, "visual", None)
    frozen = actor.freeze_vision and tower is not None
    if frozen:
        tower.requires_grad_(False).to(compute)  # nothing moves it: no master is kept
        model.features = Features()
    prepare_blocks(model, mesh, actor)
    if mesh.fsdp is None or (mesh.fsdp.size() == 1 and compute == master_dtype(compute)):
        return
    units = model.fsdp_units()
    if sum(p.numel() for p in model.parameters()) < one_unit_below:
        units = units[-1:]
    shard(
        model,
        [unit for unit in units if not (frozen and unit == [tower])],
        mesh=mesh.fsdp,
        param_dtype=compute,
        reduce_dtype=getattr(torch, actor.grad_reduce_dtype),
        reshard_after_forward=actor.archon.reshard_after_forward_policy != "never",
        # ranks embed a frozen tower's images when each first sees them: its weights must need no other rank
        whole=tower.parameters() if frozen else (),
    )


def prepare_blocks(model: Any, mesh: Mesh, actor: Any) -> None:
    """Compiles each block and recomputes it in backward, as asked for.

    Selective recomputation by op must see single ops, so there the recomputing block is compiled; else a compiled block
    is recomputed.
    """
    archon = actor.archon
    mode = archon.ac_mode if actor.gradient_checkpointing else "none"
    compiled = archon.enable_compile and mesh.device.type == "cuda"
    by_op = mode == "selective" and archon.selective_ac_option == "op"
    if compiled and not by_op:
        compile_blocks(model)
    checkpoint_blocks(model, mode, archon.selective_ac_option)
    if compiled and by_op:
        compile_blocks(model)


def compile_blocks(model: Any) -> None:
    """Each block alone: blocks of a kind share one compiled function, and hooks of FSDP stay outside it."""
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, COMPILED_VARIANTS)
    for block in blocks_of(model):
        block.forward = torch.compile(block.forward)


def blocks_of(model: Any) -> list[nn.Module]:
    visual = getattr(model, "visual", None)
    return [*model.model.layers, *(visual.blocks if visual is not None else ())]


def master_dtype(compute: torch.dtype) -> torch.dtype:
    """Of the weights that the optimizer moves: float32, or wider where the computation is."""
    return torch.promote_types(compute, torch.float32)


def checkpoint_blocks(model: Any, mode: str, option: str) -> None:
    """Recomputes each block in backward: `full`; `selective` keeps matmuls and attention ("op") or skips all but every
    N-th block ("2", "3", …)."""
    if mode == "none":
        return
    every = int(option) if mode == "selective" and option != "op" else 1
    context: dict[str, Any] = {"context_fn": _saving_contexts} if mode == "selective" and option == "op" else {}
    for block in blocks_of(model)[::every]:
        # the method is replaced, not the module wrapped: names of parameters stay those of the hub
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, early_stop=False, **context
        )


def _saving_contexts() -> Any:
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in _SAVED_OPS else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
