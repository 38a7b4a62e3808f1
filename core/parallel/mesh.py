"""The mesh of the trainer's ranks: axes dp_replicate, dp_shard, cp, tp, in that order.

The one owner of the device mesh and of the process groups made of its axes. A function that communicates is given the
group it communicates over; nothing fetches a global one. One process alone has no mesh and needs no process group.

| name   | axes                  | its ranks                                                              |
| dp     | dp_replicate,dp_shard | hold different samples                                                 |
| team   | cp, tp                | work on the same samples together and end with the same scores         |
| cp     | cp                    | hold different tokens of a stream, and whole weights when gathered     |
| tp     | tp                    | hold different rows or columns of a weight                             |
| fsdp   | dp_replicate, shard   | share out what tp left of each weight: shard is dp_shard × cp          |

A pipeline axis would come first: its stages hold different layers, and all of the above lies inside a stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class MeshError(ValueError):
    """Degrees that do not fit the number of ranks."""


@dataclass(frozen=True)
class Degrees:
    """How many ranks along each axis."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @classmethod
    def of_allocation(cls, d: int, c: int, t: int, dp_replicate: int = 1) -> Degrees:
        """From the training partition's dims; `d` is split into replicas of shards."""
        if d % dp_replicate:
            raise MeshError(f"actor.archon.dp_replicate={dp_replicate} does not divide d{d} of the allocation")
        return cls(dp_replicate, d // dp_replicate, c, t)


@dataclass(frozen=True)
class Team:
    """The ranks that work on one stream together. Each field is None where its axis has one rank."""

    cp: dist.ProcessGroup | None = None
    tp: DeviceMesh | None = None  # a mesh, since weights are tensors on it
    all: dist.ProcessGroup | None = None  # cp × tp

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        return None if self.tp is None else self.tp.get_group()


@dataclass(frozen=True)
class Mesh:
    """A rank's view of the mesh. Groups are None where their axis has one rank."""

    degrees: Degrees
    rank: int
    device: torch.device
    root: DeviceMesh | None = None
    fsdp: DeviceMesh | None = None  # (shard) or (replicate, shard); shard = dp_shard × cp
    dp: dist.ProcessGroup | None = None
    team: Team = Team()
    world: dist.ProcessGroup | None = None

    @property
    def dp_size(self) -> int:
        return self.degrees.dp_replicate * self.degrees.dp_shard

    @property
    def dp_rank(self) -> int:
        return self.rank // (self.degrees.cp * self.degrees.tp)

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its team."""
        return self.rank % (self.degrees.cp * self.degrees.tp) == 0

    @property
    def size(self) -> int:
        return self.degrees.world


def build_mesh(degrees: Degrees, *, rank: int, device: torch.device) -> Mesh:
    """The mesh over the default process group, which must exist unless there is one rank and none."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != degrees.world:
        raise MeshError(f"the mesh {degrees} has {degrees.world} ranks, the process group {world}")
    if not dist.is_initialized():
        return Mesh(degrees, rank, device)
    axes = ("dp_replicate", "dp_shard", "cp", "tp")
    root = init_device_mesh(device.type, tuple(getattr(degrees, axis) for axis in axes), mesh_dim_names=axes)
    if degrees.world == 1:
        return Mesh(degrees, rank, device, root, root["dp_shard"], world=dist.group.WORLD)
    shard = root["dp_shard", "cp"]._flatten("shard") if degrees.cp > 1 else root["dp_shard"]
    fsdp = shard
    if degrees.dp_replicate > 1:
        names = ("dp_replicate", "shard" if degrees.cp > 1 else "dp_shard")
        fsdp = root[names]
    team = root["cp", "tp"]._flatten("team")
    return Mesh(
        degrees,
        rank,
        device,
        root,
        fsdp,
        dp=_group(root["dp_replicate", "dp_shard"]._flatten("dp")),
        team=Team(_group(root["cp"]), root["tp"] if degrees.tp > 1 else None, _group(team)),
        world=dist.group.WORLD,
    )


def join(store: dist.Store, *, rank: int, world: int, device: torch.device, timeout: float) -> None:
    """Makes the default process group over a store: gloo on CPU, and beside NCCL for host-side exchange."""
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    device_id = device if device.type == "cuda" else None
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout), device_id=device_id
    )


def _group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    return mesh.get_group() if mesh.size() > 1 else None
