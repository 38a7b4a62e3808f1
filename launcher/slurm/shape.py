"""hetjob or one job? And on which nodes of it each partition lies.

A hetjob where each partition can have nodes of its own within cluster.n_nodes; else one job whose steps share nodes.
Values to values: launcher.planning.judge asks, launcher.slurm.job writes the script of the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from core.config import Config
from launcher.planning.layout import Node, Partition, Plan


@dataclass(frozen=True)
class Shape:
    kind: str  # hetjob | one_job
    why: str


def shape_of(config: Config, partitions: list[Partition]) -> Shape:
    asked = config.slurm.shape
    wanted = [len(each.nodes) for each in partitions]
    told = " + ".join(map(str, wanted))
    n_nodes = config.cluster.n_nodes
    fits = sum(wanted) <= n_nodes
    if len(partitions) == 1:
        return Shape("one_job", "there is one partition")
    if asked == "one_job":
        return Shape("one_job", "slurm.shape asks for it")
    if asked == "hetjob":
        return Shape("hetjob", "slurm.shape asks for it")
    if fits:
        return Shape("hetjob", f"each partition has nodes of its own ({told} of cluster.n_nodes={n_nodes})")
    why = f"components of a hetjob never share a node and {told} nodes are more than cluster.n_nodes={n_nodes}"
    return Shape("one_job", why)


def apart(partitions: list[Partition]) -> list[Partition]:
    """Every partition on nodes of its own, GPUs counted from 0 on each: what the components of a hetjob see."""
    moved, first = [], 0
    for partition in partitions:
        nodes = [_numbered(node, first + node.index) for node in partition.nodes]
        first += len(nodes)
        moved.append(replace(partition, nodes=nodes))
    return moved


def steps(partitions: list[Partition]) -> list[Partition]:
    """Hosts stay shared, GPUs are counted from 0 within each step: a step sees only its own."""
    return [replace(each, nodes=[_numbered(node, node.host) for node in each.nodes]) for each in partitions]


def placed(config: Config, partitions: list[Partition]) -> tuple[list[Partition], Shape]:
    shape = shape_of(config, partitions)
    if shape.kind == "hetjob":
        return apart(partitions), shape
    # where Slurm is not asked for GPUs it does not split them either: they keep the numbers of the node
    split = all(config.slurm.of(each.name).gpu_form != "none" for each in partitions)
    return (steps(partitions) if split else partitions), shape


def hosts_of(plan: Plan) -> int:
    return 1 + max(node.host for partition in plan.partitions for node in partition.nodes)


def _numbered(node: Node, host: int) -> Node:
    place = {gpu: number for number, gpu in enumerate(node.gpus)}
    return replace(
        node,
        host=host,
        gpus=[place[gpu] for gpu in node.gpus],
        servers=[replace(server, gpus=[place[gpu] for gpu in server.gpus]) for server in node.servers],
        ranks=[replace(rank, gpu=None if rank.gpu is None else place[rank.gpu]) for rank in node.ranks],
    )
