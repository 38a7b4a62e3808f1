"""A bad node is named before anything is started on any."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.run_dir import RunDir
from launcher.slurm import preflight
from launcher.slurm.interface import InterfaceError, choose
from launcher.slurm.preflight import Gpu, Record, judge, parse_smi

NODES = ("inference-0", "training-0", "training-1")


def record(node: str, host: str = "", **changes: object) -> Record:
    fit = Record(node, host or f"host-{node}", 2, (Gpu("a"), Gpu("b")), {"torch": "2.13"}, 65536, -1, 0.0)
    return replace(fit, **changes)  # type: ignore[arg-type]


def test_fit_nodes_pass() -> None:
    assert judge([record(node) for node in NODES], NODES) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": (Gpu("a"),)}, "2 GPUs are planned here, 1 are visible (a)"),
        ({"gpus": (Gpu("a"), Gpu("b", 70000))}, "GPU b is not free, 70000 MiB"),
        ({"versions": {"torch": "2.11"}}, "torch is 2.11, elsewhere 2.13"),
        ({"versions": {}}, "torch is missing, elsewhere 2.13"),
        ({"open_files": 1024}, "only 1024 files"),
        ({"clock_offset": 60.0}, "its clock is +60 s off"),
        ({"clock_offset": -31.0}, "its clock is -31 s off"),
        ({"problems": ("nvidia-smi failed: x",)}, "nvidia-smi failed"),
    ],
)
def test_the_bad_node_is_named(changes: dict[str, object], said: str) -> None:
    records = [record("inference-0"), record("training-0"), record("training-1", "node7", **changes)]
    problems = judge(records, NODES)
    assert len(problems) == 1 and problems[0].startswith("training-1 (node7): ") and said in problems[0]


def test_a_gpu_that_two_partitions_of_a_node_were_given() -> None:
    """submitit#1704 and its helpers: all tasks land on GPU 0."""
    records = [record("inference-0", "node1"), record("training-0", "node1", gpus=(Gpu("b"), Gpu("c")))]
    assert judge(records, NODES[:2]) == ["training-0 (node1): GPU b was given to inference-0 too"]


def test_a_directory_that_is_not_shared_is_named(tmp_path: Path) -> None:
    """Each node writes into a directory of its own: what one writes, no other reads."""
    found = {}
    threads = [
        threading.Thread(
            target=lambda node=node: found.update(
                {node: preflight.check(RunDir(tmp_path / node), 1, record(node), NODES[:2], wait_secs=0.5)}
            )
        )
        for node in NODES[:2]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert "cluster.fileroot must be shared" in found["training-0"][0] and "inference-0" in found["training-0"][0]
    assert "training-0: its preflight record was not seen from inference-0" in found["inference-0"][0]


def test_records_that_are_shared_are_read_on_every_node(tmp_path: Path) -> None:
    for node in NODES[:1]:
        assert preflight.check(RunDir(tmp_path), 3, record(node), [node], wait_secs=5) == []
    assert preflight.read(preflight.directory(RunDir(tmp_path), 3) / "inference-0.json") == record("inference-0")


def test_nvidia_smi_is_read_with_or_without_the_sites_cgroups() -> None:
    text = "0, GPU-aa, 3\n1, GPU-bb, 81000\n2, GPU-cc, 0\n"
    assert parse_smi(text, []) == (Gpu("GPU-aa", 3), Gpu("GPU-bb", 81000), Gpu("GPU-cc", 0))
    assert parse_smi(text, ["1", "2"]) == (Gpu("GPU-bb", 81000), Gpu("GPU-cc", 0))
    assert parse_smi(text, ["GPU-cc"]) == (Gpu("GPU-cc", 0),)


def test_this_machine_can_be_examined(tmp_path: Path) -> None:
    mine = preflight.examine(RunDir(tmp_path), "training-0", [], "cpu")
    assert abs(mine.clock_offset) < 2 and mine.versions["torch"] != "missing" and "files" in mine.versions["code"]


def test_an_interface_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InterfaceError, match=r"has no ib7 .*lo"):
        choose("ib7", "node1", "node1", [])
    assert choose("lo", "node1", "node1", []).address == "127.0.0.1"
    assert choose(None, "node2", "127.0.0.1", []).name == "lo"
