"""The table of children of one node: which process of the plan is started with which arguments and environment.

Values to values; launcher.node.children runs them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from launcher.planning.layout import Node, Plan
from launcher.run_dir import RunDir

REPOSITORY = Path(__file__).resolve().parents[2]
ROLES = "launcher.roles"
SERVER_ROLES = {"embedded": "embedded_server", "vllm": "inference_server", "sglang": "inference_server"}
LOOPBACK = "127.0.0.1"
CANNOT_GO_ON = 4
"""Exit status of a service or rank whose failure another start would not mend: it is not started again."""


class Kind(StrEnum):
    SERVICE = "service"
    SERVER = "server"
    RANK = "rank"


@dataclass(frozen=True)
class Spec:
    name: str
    kind: Kind
    command: tuple[str, ...]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    """Set on top of the daemon's environment."""
    grace: float = 15.0
    keep_open: tuple[int, ...] = ()
    """Descriptors that the child's whole tree inherits."""
    scratch: str = ""
    """What the guard removes when the daemon is killed and cannot do it itself."""


@dataclass(frozen=True)
class NodeContext:
    """What the children of one node have in common."""

    run_dir: RunDir
    plan: Plan
    attempt: int
    partition: str
    node: int
    local: Path
    daemon: str = ""
    store: str = ""
    host: str = LOOPBACK
    roles: str = ROLES
    grace: float = 15.0
    visible_gpus: tuple[str, ...] = ()
    """CUDA_VISIBLE_DEVICES of the daemon, if it was given one: the plan's GPU i is its i-th entry."""
    env_vars: Mapping[str, str] = field(default_factory=dict)
    keep_open: tuple[int, ...] = ()
    interface: str = ""
    """Name of the network interface that `host` is an address of."""
    on_cluster: bool = False
    """Started by a batch scheduler: TERM and USR2 are its warnings, the run goes on in a later attempt."""

    @property
    def name(self) -> str:
        return f"{self.partition}-{self.node}"

    @property
    def planned(self) -> Node:
        partition = self.plan.partition(self.partition)
        assert partition is not None, f"the plan has no partition {self.partition}"
        return partition.nodes[self.node]


def lead_node(plan: Plan) -> str:
    """The node whose daemon hosts the registry: training node 0, or inference node 0 where nothing is trained."""
    return "training-0" if plan.partition("training") else "inference-0"


def service_specs(context: NodeContext) -> list[Spec]:
    """data and rollout, on training node 0; rollout only where there is something to sample with."""
    if context.name != "training-0":
        return []
    names = ["data"] + (["rollout"] if context.plan.partition("inference") else [])
    return [_spec(context, Kind.SERVICE, name, name, []) for name in names]


def server_specs(context: NodeContext) -> list[Spec]:
    specs = []
    for server in context.planned.servers:
        partition = context.plan.partition(context.partition)
        assert partition is not None
        role = SERVER_ROLES[partition.backend]
        gpus = ",".join(str(gpu) for gpu in server.gpus)
        specs.append(_spec(context, Kind.SERVER, role, server.process, ["--gpus", gpus], server.gpus))
    return specs


def rank_specs(context: NodeContext, generation: int) -> list[Spec]:
    partition = context.plan.partition("training")
    if partition is None or context.partition != "training":
        return []
    world = sum(len(node.ranks) for node in partition.nodes)
    specs = []
    for rank in context.planned.ranks:
        words = ["--rank", str(rank.rank), "--world", str(world), "--local-rank", str(rank.local_rank)]
        words += ["--generation", str(generation), "--store", context.store]
        gpus = [] if rank.gpu is None else [rank.gpu]
        specs.append(_spec(context, Kind.RANK, "trainer", f"rank-{rank.rank}", words, gpus))
    return specs


def _spec(
    context: NodeContext, kind: Kind, role: str, name: str, words: Sequence[str], gpus: Sequence[int] = ()
) -> Spec:
    command = (
        *(sys.executable, "-P", "-m", f"{context.roles}.{role}"),
        *("--run-dir", str(context.run_dir.root), "--attempt", str(context.attempt)),
        *("--partition", context.partition, "--node", str(context.node), "--name", name),
        *("--daemon", context.daemon, "--local", str(context.local), "--host", context.host),
        *words,
    )
    log = context.run_dir.log(context.attempt, context.partition, context.node, name)
    return Spec(
        name, kind, command, log, child_environment(context, gpus), context.grace, context.keep_open, str(context.local)
    )


def child_environment(context: NodeContext, gpus: Sequence[int]) -> dict[str, str]:
    environment = {
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": ",".join(_visible(context.visible_gpus, gpu) for gpu in gpus),
    }
    if context.plan.device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"
    if context.host == LOOPBACK:
        # gloo looks its own host name up otherwise, which fails or leads to an outer interface
        environment |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    elif context.interface:
        environment |= {"GLOO_SOCKET_IFNAME": context.interface, "NCCL_SOCKET_IFNAME": context.interface}
    return {**environment, **context.env_vars}


def _visible(visible: Sequence[str], gpu: int) -> str:
    return visible[gpu] if visible else str(gpu)
