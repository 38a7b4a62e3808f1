"""The types of plan.json, to and from JSON; values only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Server:
    """A server, or what of it is on one node: part 0, the head, answers for all of them."""

    name: str
    gpus: list[int]
    part: int = 0
    parts: int = 1

    @property
    def process(self) -> str:
        """The name of the process that stands before it on its node."""
        return f"{self.name}-part-{self.part}" if self.part else self.name


@dataclass(frozen=True)
class Rank:
    rank: int
    local_rank: int
    gpu: int | None


@dataclass(frozen=True)
class Node:
    """One node of one partition.

    `index` counts within the partition, `host` over the cluster: two partitions may share a host.
    """

    index: int
    host: int
    gpus: list[int]
    servers: list[Server]
    ranks: list[Rank]


@dataclass(frozen=True)
class Partition:
    name: str
    backend: str
    d: int
    p: int
    t: int
    c: int
    e: int
    nodes: list[Node]

    @property
    def world(self) -> int:
        return self.d * self.p * self.t * self.c

    def nodes_of(self, server: str) -> list[Node]:
        """Those that hold a part of it, the head's first."""
        return [node for node in self.nodes if any(each.name == server for each in node.servers)]


@dataclass(frozen=True)
class BatchPlan:
    """Of one step: groups, samples, and how many of them a data-parallel rank sees."""

    groups: int
    samples: int
    minibatches: int
    data_ranks: int
    samples_per_rank: int
    micro_batches_per_rank: int
    tokens_per_micro_batch: int
    steps: int | None


@dataclass(frozen=True)
class Memory:
    """Estimated GiB per GPU of one partition, by what holds it."""

    partition: str
    parts: dict[str, float]
    total: float
    limit: float


@dataclass(frozen=True)
class Plan:
    run_id: str
    device: str
    emulate: bool
    swaps: list[str]
    warnings: list[str]
    partitions: list[Partition]
    batch: BatchPlan
    memory: list[Memory]
    disk_bytes: int
    not_built: list[str]
    notes: list[str]
    model: dict[str, Any]
    shape: str = ""
    """On Slurm: hetjob or one_job, and why."""
    shape_why: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        fields: dict[str, Any] = json.loads(text)
        fields["partitions"] = [_partition(each) for each in fields["partitions"]]
        fields["batch"] = BatchPlan(**fields["batch"])
        fields["memory"] = [Memory(**each) for each in fields["memory"]]
        return Plan(**fields)

    def partition(self, name: str) -> Partition | None:
        return next((each for each in self.partitions if each.name == name), None)


def _partition(fields: dict[str, Any]) -> Partition:
    nodes = [
        Node(
            **{
                **node,
                "servers": [Server(**server) for server in node["servers"]],
                "ranks": [Rank(**rank) for rank in node["ranks"]],
            }
        )
        for node in fields["nodes"]
    ]
    return Partition(**{**fields, "nodes": nodes})
