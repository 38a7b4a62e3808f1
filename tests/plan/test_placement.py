"""Who gets which GPU: nothing twice, servers and tensor groups within a node or whole nodes, partitions sharing one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.allocation import parse
from launcher.planning.placement import place, spread_warnings


def gpus(text: str, nodes: int, per_node: int) -> dict[str, list[tuple[int, list[int]]]]:
    partitions, problems = place(parse(text), nodes, per_node, "cuda")
    assert not problems, problems
    return {each.name: [(node.host, node.gpus) for node in each.nodes] for each in partitions}


def test_two_partitions_share_a_node() -> None:
    assert gpus("vllm:d4+d4", 1, 8) == {"inference": [(0, [0, 1, 2, 3])], "training": [(0, [4, 5, 6, 7])]}


def test_a_partition_larger_than_a_node_is_spread_evenly() -> None:
    placed = gpus("sglang:d4+d12", 2, 8)
    assert placed["training"] == [(0, [0, 1, 2, 3, 4, 5]), (1, [0, 1, 2, 3, 4, 5])]
    assert placed["inference"] == [(0, [6, 7]), (1, [6, 7])]


def test_whole_nodes_are_said_to_be_missing() -> None:
    # the example of the design: 2 nodes of 4, one is begun by two servers
    _, problems = place(parse("sglang:d2+archon:d2t4"), 2, 4, "cuda")
    assert [problem.message for problem in problems] == [
        "wants 2 + 8 = 10 GPUs, the cluster has 8 (cluster.n_nodes=2 × cluster.n_gpus_per_node=4)"
    ]
    _, problems = place(parse("sglang:t3+archon:d2t2"), 2, 4, "cuda")
    assert problems == []
    _, problems = place(parse("sglang:d2t3+archon:d1t2"), 2, 4, "cuda")
    assert "training wants 1 node of 2 GPUs (d1t2), the nodes have 1, 1 left after sglang:d2t3" in problems[0].message


def test_servers_of_several_gpus_are_numbered_over_the_nodes() -> None:
    partitions, _ = place(parse("vllm:d4t2p2+d2"), 3, 8, "cuda")
    servers = [(node.host, server.name, server.gpus) for node in partitions[0].nodes for server in node.servers]
    assert servers == [
        (0, "server-0", [0, 1, 2, 3]),
        (0, "server-1", [4, 5, 6, 7]),
        (1, "server-2", [0, 1, 2, 3]),
        (1, "server-3", [4, 5, 6, 7]),
    ]
    assert [(node.host, node.gpus) for node in partitions[1].nodes] == [(2, [0, 1])]


@pytest.mark.parametrize("text", ["sglang:d2t4p2+d8", "vllm:d2t8+d8"])
def test_a_server_larger_than_a_node_takes_whole_nodes(text: str) -> None:
    partitions, problems = place(parse(text), 6, 4, "cuda")
    assert not problems
    inference, training = partitions
    parts = [
        (node.host, each.name, each.part, each.parts, each.gpus) for node in inference.nodes for each in node.servers
    ]
    assert parts == [
        (0, "server-0", 0, 2, [0, 1, 2, 3]),
        (1, "server-0", 1, 2, [0, 1, 2, 3]),
        (2, "server-1", 0, 2, [0, 1, 2, 3]),
        (3, "server-1", 1, 2, [0, 1, 2, 3]),
    ]
    assert [node.servers[0].process for node in inference.nodes[:2]] == ["server-0", "server-0-part-1"]
    assert [node.index for node in inference.nodes_of("server-1")] == [2, 3]
    assert [node.host for node in training.nodes] == [4, 5]


def test_whole_nodes_for_a_server_are_not_those_that_are_begun() -> None:
    partitions, problems = place(parse("d2+vllm:t4p2"), 3, 4, "cuda")
    assert not problems and [node.host for node in partitions[1].nodes] == [1, 2]
    _, problems = place(parse("d4t3+vllm:t4p2"), 5, 4, "cuda")
    assert "inference wants 2 nodes of 4 GPUs (d1p2t4), 1 of 5 remains after archon:d4t3" in problems[0].message


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sglang:t6+d8", "over several it takes whole ones, so t × p must be a multiple of 4"),
        ("vllm:t3p4+d8", "over several of them t=3 must divide 4 or be a multiple of it"),
        ("embedded:t8+d8", "embedded has no server over several nodes; vllm and sglang have"),
    ],
)
def test_a_server_that_cannot_be_cut_into_nodes_is_refused(text: str, why: str) -> None:
    _, problems = place(parse(text), 8, 4, "cuda")
    assert "a server (t × p) of" in problems[0].message and why in problems[0].message and problems[0].layout
    assert problems[0].pointer.splitlines()[1].index("^") == 4 + text.index(":") + 1


def test_a_tensor_group_that_leaves_its_node_is_said() -> None:
    assert spread_warnings(parse("vllm:t4p2+d4"), 4) == []
    (line,) = spread_warnings(parse("vllm:d2t8+d4"), 4)
    assert line.startswith("vllm:d2t8: t=8 crosses nodes of 4 GPUs") and "t4p2 keeps t within a node" in line


def test_on_a_cpu_there_is_one_node_without_gpus() -> None:
    partitions, problems = place(parse("embedded:d2+d2"), 1, 1, "cpu")
    assert not problems
    assert [node.gpus for each in partitions for node in each.nodes] == [[], []]
    assert [rank.gpu for rank in partitions[1].nodes[0].ranks] == [None, None]
    assert [server.gpus for server in partitions[0].nodes[0].servers] == [[], []]


sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])


@given(
    sizes, st.sampled_from([1, 2, 4]), sizes, st.sampled_from([1, 2, 4]), st.integers(1, 5), st.sampled_from([2, 4, 8])
)
@settings(max_examples=300, deadline=None)
def test_whatever_is_placed_is_whole_and_apart(d: int, t: int, td: int, tt: int, nodes: int, per_node: int) -> None:
    partitions, problems = place(parse(f"sglang:d{d}t{t}+d{td}t{tt}"), nodes, per_node, "cuda")
    if problems:
        assert partitions == []
        return
    taken = [(node.host, gpu) for each in partitions for node in each.nodes for gpu in node.gpus]
    assert len(taken) == len(set(taken)) == d * t + td * tt
    assert all(0 <= host < nodes and 0 <= gpu < per_node for host, gpu in taken)
    inference, training = partitions
    assert len({len(node.gpus) for node in inference.nodes}) == len({len(node.gpus) for node in training.nodes}) == 1
    servers = [server for node in inference.nodes for server in node.servers]
    parts = max(1, t // per_node)
    assert [(server.name, server.part) for server in servers] == [
        (f"server-{k}", part) for k in range(d) for part in range(parts)
    ]
    assert all(len(server.gpus) * parts == t and server.parts == parts for server in servers)
    ranks = [rank for node in training.nodes for rank in node.ranks]
    assert [rank.rank for rank in ranks] == list(range(td * tt))
    for node in training.nodes:
        assert [rank.gpu for rank in node.ranks] == node.gpus
        assert [rank.local_rank for rank in node.ranks] == list(range(len(node.gpus)))
        assert len(node.gpus) % tt == 0


@pytest.mark.parametrize("text", ["sglang:d4+d5", "sglang:d8+d8"])
def test_more_gpus_than_the_cluster_has(text: str) -> None:
    _, problems = place(parse(text), 1, 8, "cuda")
    assert len(problems) == 1 and "the cluster has 8" in problems[0].message and problems[0].layout
