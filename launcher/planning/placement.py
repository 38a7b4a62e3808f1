"""Which GPUs of which nodes each partition gets, and which server or rank runs on each.

A partition is spread evenly over as few nodes as hold it; two partitions may share a node. A server stays within one
node where it fits, else it takes whole nodes, one part on each; the tensor ranks of a trainer stay within one node.
"""

from __future__ import annotations

from dataclasses import dataclass

from launcher.allocation import Allocation, Component, Dims, pointer
from launcher.planning.layout import Node, Partition, Rank, Server
from launcher.planning.problem import Problem

SPANNING = ("vllm", "sglang")
"""Backends that have a server over several nodes."""


@dataclass(frozen=True)
class Slice:
    """The GPUs of one node that a partition gets."""

    host: int
    gpus: list[int]


def place(
    allocation: Allocation, n_nodes: int, gpus_per_node: int, device: str
) -> tuple[list[Partition], list[Problem]]:
    """The partitions on their nodes. On a CPU there is one node and no GPU to share out."""
    components = allocation.components
    if device == "cpu":
        return [_partition(each, [Slice(0, [])], per_node=each.dims.world) for each in components], []
    problems = _too_large(allocation, n_nodes, gpus_per_node)
    if problems:
        return [], problems
    placed, first_problem = _pack(components, n_nodes, gpus_per_node)
    if placed is None:
        by_size = tuple(sorted(components, key=lambda each: -each.dims.world))
        placed, _ = _pack(by_size, n_nodes, gpus_per_node)
    if placed is None:
        refused, before = first_problem
        return [], [_does_not_fit(allocation, refused, before, n_nodes, gpus_per_node)]
    return [_partition(each, placed[each], per_node=each.dims.world // len(placed[each])) for each in components], []


def _too_large(allocation: Allocation, n_nodes: int, gpus_per_node: int) -> list[Problem]:
    problems = []
    total = n_nodes * gpus_per_node
    for each in allocation.components:
        why = _uncut(each, gpus_per_node)
        if why:
            problems.append(Problem("allocation_mode", why, pointer(allocation.text, *each.dims_span), layout=True))
    if allocation.world > total:
        spans = [each.span for each in allocation.components]
        wanted = " + ".join(str(each.dims.world) for each in allocation.components) + f" = {allocation.world}"
        wanted = wanted if len(spans) > 1 else str(allocation.world)
        problems.append(
            Problem(
                "allocation_mode",
                f"wants {wanted} GPUs, "
                f"the cluster has {total} (cluster.n_nodes={n_nodes} × cluster.n_gpus_per_node={gpus_per_node})",
                pointer(allocation.text, spans[0][0], spans[-1][1]),
                layout=True,
            )
        )
    return problems


def _uncut(component: Component, node: int) -> str:
    """Why its servers or tensor groups cannot lie on nodes of so many GPUs; empty where they can."""
    dims = component.dims
    within = dims.replica if component.is_inference else dims.t
    if within <= node:
        return ""
    what = "a server (t × p)" if component.is_inference else "a tensor-parallel group (t)"
    larger = f"{what} of {within} GPUs does not fit in a node of {node} (cluster.n_gpus_per_node)"
    if not component.is_inference:
        return larger
    if component.backend not in SPANNING:
        return f"{larger}, and {component.backend} has no server over several nodes; {' and '.join(SPANNING)} have"
    if within % node:
        return f"{larger}; over several it takes whole ones, so t × p must be a multiple of {node}"
    if node % dims.t and dims.t % node:
        return f"{larger}; over several of them t={dims.t} must divide {node} or be a multiple of it"
    return ""


def spread_warnings(allocation: Allocation | None, gpus_per_node: int) -> list[str]:
    """Where a tensor group of a server leaves its node."""
    return [
        f"{each.backend}:{each.dims}: t={each.dims.t} crosses nodes of {gpus_per_node} GPUs: every layer's all-reduce "
        f"goes over the network; t{gpus_per_node}p{each.dims.replica // gpus_per_node} keeps t within a node"
        for each in (allocation.components if allocation else ())
        if each.is_inference and each.dims.t > gpus_per_node
    ]


def _pack(
    components: tuple[Component, ...], n_nodes: int, gpus_per_node: int
) -> tuple[dict[Component, list[Slice]] | None, tuple[Component, list[Component]]]:
    """First fit in the given order; on failure the component that found no place and those before it."""
    free = [list(range(gpus_per_node)) for _ in range(n_nodes)]
    placed: dict[Component, list[Slice]] = {}
    for component in components:
        slices = _take(free, component, gpus_per_node)
        if slices is None:
            return None, (component, list(placed))
        placed[component] = slices
    return placed, (components[0], [])


def _take(free: list[list[int]], component: Component, gpus_per_node: int) -> list[Slice] | None:
    dims = component.dims
    together = dims.replica if component.is_inference else dims.t
    together = min(together, gpus_per_node)  # a larger server takes whole nodes
    largest = max(len(gpus) for gpus in free)
    for nodes in range(-(-dims.world // max(1, largest)), len(free) + 1):
        per_node = dims.world // nodes
        if dims.world % nodes or per_node % together:
            continue
        hosts = [host for host, gpus in enumerate(free) if len(gpus) >= per_node][:nodes]
        if len(hosts) == nodes:
            return [Slice(host, [free[host].pop(0) for _ in range(per_node)]) for host in hosts]
    return None


def _does_not_fit(
    allocation: Allocation, refused: Component, before: list[Component], n_nodes: int, gpus_per_node: int
) -> Problem:
    side = "inference" if refused.is_inference else "training"
    world = refused.dims.world
    nodes = -(-world // gpus_per_node)
    free = [list(range(gpus_per_node)) for _ in range(n_nodes)]
    for each in before:
        _take(free, each, gpus_per_node)
    whole = sum(len(gpus) == gpus_per_node for gpus in free)
    wants = f"{nodes} {'node' if nodes == 1 else 'nodes'} of {-(-world // nodes)} GPUs ({refused.dims})"
    if nodes > 1 and world % nodes == 0:
        left = f"{whole} of {n_nodes} {'remains' if whole == 1 else 'remain'}"
    else:
        left = f"the nodes have {', '.join(str(len(gpus)) for gpus in free)} left"
    after = f" after {' and '.join(f'{each.backend}:{each.dims}' for each in before)}" if before else ""
    return Problem(
        "allocation_mode",
        f"{side} wants {wants}, {left}{after}",
        pointer(allocation.text, *refused.dims_span),
        layout=True,
    )


def _partition(component: Component, slices: list[Slice], per_node: int) -> Partition:
    dims = component.dims
    nodes = [
        Node(
            index=index,
            host=place.host,
            gpus=place.gpus,
            servers=_servers(dims, place.gpus, index, per_node) if component.is_inference else [],
            ranks=[] if component.is_inference else _ranks(place.gpus, index, per_node),
        )
        for index, place in enumerate(slices)
    ]
    return Partition(
        name="inference" if component.is_inference else "training",
        backend=component.backend if component.is_inference else "archon",
        d=dims.d,
        p=dims.p,
        t=dims.t,
        c=dims.c,
        e=dims.e,
        nodes=nodes,
    )


def _servers(dims: Dims, gpus: list[int], node: int, per_node: int) -> list[Server]:
    size = dims.replica
    if size > per_node:
        parts = size // per_node
        return [Server(f"server-{node // parts}", gpus, node % parts, parts)]
    count = per_node // size
    return [Server(f"server-{node * count + k}", gpus[k * size : (k + 1) * size]) for k in range(count)]


def _ranks(gpus: list[int], node: int, per_node: int) -> list[Rank]:
    return [Rank(node * per_node + k, k, gpus[k] if gpus else None) for k in range(per_node)]
