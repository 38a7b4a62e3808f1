"""Sections `cluster` and `scheduler`: the machines a run may use, and who hands them out."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from core.config.base import Foreign, NotBuilt, Section


class NameResolve(Section):
    """Accepted for AReaL's files; the registry here is the TCPStore of the training partition's first daemon."""

    type: Literal["nfs", "etcd3", "ray"] = "nfs"
    nfs_record_root: str = "/tmp/areal/name_resolve"
    etcd3_addr: str = "localhost:2379"
    ray_actor_name: str = "ray_kv_store"


class Cluster(Section):
    name_resolve: NameResolve = NameResolve()
    cluster_name: str = "local"
    fileroot: str = "/tmp/areal/"
    n_nodes: Annotated[int, Field(ge=1, le=65_536)] = 32
    n_gpus_per_node: Annotated[int, Field(ge=1, le=1024)] = 8
    gpu_memory_gib: Annotated[float, Field(gt=0)] = 80.0  # ours


class Scheduler(Section):
    type: Annotated[Literal["local", "slurm", "ray"] | None, NotBuilt((None, "local", "slurm"))] = None

    foreign: ClassVar[dict[str, Foreign]] = {
        "endpoint": Foreign("http://localhost:8081"),
        "deploy_mode": Foreign("separation"),
        "functioncall_service_domain": Foreign("http://localhost:8080"),
        "reward_functioncall_config": Foreign({}),
        "reward_model_path": Foreign(""),
        "reward_model_service_url": Foreign("http://localhost:30000/classify"),
    }


class Paths(Section):
    """Ours: where things lie on the machines."""

    cache: str = "~/.cache/vlm-rl"
    local: str | None = None  # node-local scratch; null = /dev/shm/<run id>, else the temporary directory
    vllm_python: str | None = None
    sglang_python: str | None = None
    vllm_container: str | None = None  # an Apptainer image, path or URI, for the servers alone
    sglang_container: str | None = None


class WeightSync(Section):
    """Ours: how a published version reaches the servers."""

    keep: Annotated[int, Field(ge=1, le=100_000)] = 2
    visible_secs: Annotated[float, Field(ge=0)] = 90.0
    verify: Literal["full", "sizes"] = "full"
    mode: Literal["rolling", "together"] = "together"
    paused_share: Annotated[float, Field(gt=0, le=1)] = 0.5
