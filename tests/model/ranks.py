"""What two gloo ranks compute for test_parallel: each writes its tensors to a file, the test compares them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from core.ops.packed import PackedBatch
from core.parallel import collectives
from core.parallel.layers import ColumnParallelLinear, ShardError, sum_partial_gradients
from core.parallel.mesh import Team
from models.archon.qwen2.model import Qwen2Model, Qwen2ModelArgs, Qwen2StateDictAdapter

WORLD = 2


def run(rank: int, folder: Path, checkpoints: dict[str, Path], packed: PackedBatch) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    group = dist.group.WORLD
    assert group is not None
    found: dict[str, Any] = {"collectives": moved(rank, group)}
    for name, path in checkpoints.items():
        found[name] = {"tp": tensor_parallel(path, packed, mesh), "fsdp": fully_sharded(path, packed)}
    try:
        ColumnParallelLinear(8, 9, tp=mesh)
        found["uneven"] = ""
    except ShardError as error:
        found["uneven"] = str(error)
    torch.save(found, folder / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def moved(rank: int, group: dist.ProcessGroup) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Output and input gradient of each collective; inputs and output gradients differ by rank."""
    calls: dict[str, Any] = {
        "copy": lambda x: collectives.copy(x, group),
        "gather": lambda x: collectives.gather(x, group, dim=-1),
        "gather_sum": lambda x: collectives.gather_sum(x, group, dim=0),
        "reduce_scatter": lambda x: collectives.reduce_scatter(x, group, dim=0),
    }
    found = {}
    for name, call in calls.items():
        x = (torch.arange(8.0).reshape(2, 4) + 100 * rank).requires_grad_()
        y = call(x)
        y.backward(torch.arange(float(y.numel())).reshape(y.shape) + 1000 * rank)
        assert x.grad is not None
        found[name] = (y.detach(), x.grad)
    return found


def tensor_parallel(path: Path, packed: PackedBatch, mesh: DeviceMesh) -> dict[str, Any]:
    """Logits, scores and every gradient of the model whose layers are cut over both ranks."""
    model = Qwen2Model(Qwen2ModelArgs.from_pretrained(path), team=Team(tp=mesh, all=mesh.get_group()))
    scores = model(packed).scores
    assert scores is not None
    (scores.logp_R.sum() + scores.entropy_R.square().sum()).backward()
    sum_partial_gradients(model.parameters(), mesh)
    with torch.no_grad():
        logits = model(PackedBatch(**{**vars(packed), "scoring": None})).logits_RV
    return {
        "logits": logits,
        "logp": scores.logp_R.detach(),
        "entropy": scores.entropy_R.detach(),
        "grads": {name: whole(p.grad) for name, p in model.named_parameters()},
        "o_proj": tuple(model.model.layers[0].self_attn.o_proj.weight.to_local().shape),
    }


def fully_sharded(path: Path, packed: PackedBatch) -> dict[str, Any]:
    """Parameters, scores and summed gradients under FSDP2, loaded straight into the shards."""
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp_shard",))
    args = Qwen2ModelArgs.from_pretrained(path)
    model = Qwen2Model.on_meta(args)
    model.to_empty(device="cpu")
    model.tie()
    for unit in model.fsdp_units():
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    Qwen2StateDictAdapter(args).load_into(model, path)
    loaded = {name: whole(p).clone() for name, p in model.named_parameters()}
    scores = model(packed).scores
    assert scores is not None
    (scores.logp_R.sum() + scores.entropy_R.square().sum()).backward()
    grads = {name: None if p.grad is None else whole(p.grad) for name, p in model.named_parameters()}
    return {"loaded": loaded, "logp": scores.logp_R.detach(), "grads": grads}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor().detach()
