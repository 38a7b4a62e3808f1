"""Sixteen node daemons, each with an address of its own: they find each other, beat, and are gone when told."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.config import load
from core.rpc.client import Client
from launcher.launch import begin
from launcher.node.state import read_rendezvous, read_state
from launcher.planning.layout import BatchPlan, Node, Partition, Plan, Rank, Server
from tests.support.runs import ROOT, environment, processes_of
from tests.support.slurm_cluster.cluster import until
from tests.support.slurm_cluster.namespaces import Namespaces

DAEMONS = 16
LIMIT_SECS = 40
CORES = 2


@pytest.fixture
def spaces() -> Iterator[Namespaces]:
    made = Namespaces("vlmrs", "10.79.0", DAEMONS)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def plan_of_sixteen() -> Plan:
    half = DAEMONS // 2
    serving = [Node(index, index, [], [Server(f"server-{index}", [])], []) for index in range(half)]
    training = [Node(index, half + index, [], [], [Rank(index, 0, None)]) for index in range(half)]
    partitions = [
        Partition("inference", "embedded", half, 1, 1, 1, 1, serving),
        Partition("training", "archon", half, 1, 1, 1, 1, training),
    ]
    return Plan("sixteen", "cpu", True, [], [], partitions, BatchPlan(1, 1, 1, 1, 1, 1, 1, 1), [], 0, [], [], {})


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_sixteen_daemons_start_beat_and_are_torn_down(spaces: Namespaces, tmp_path: Path) -> None:
    place = (f"cluster.fileroot={tmp_path}", "trial_name=sixteen", "recover.mode=disabled")
    launch = begin(load(ROOT / "configs" / "smoke.yaml", place), plan_of_sixteen())
    run_dir = launch.run_dir
    names = [f"{partition.name}-{node.index}" for partition in launch.plan.partitions for node in partition.nodes]
    # children that live on: stand-ins which only import what a role must
    (run_dir.root / "behaviour.json").write_text(json.dumps({f"rank-{index}": "serve" for index in range(DAEMONS)}))
    began, before = time.monotonic(), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    daemons = []
    for index, name in enumerate(names, 1):
        partition, _, node = name.rpartition("-")
        words = [
            *spaces.inside(index), sys.executable, "-P", "-m", "launcher.node", "--run-dir", str(run_dir.root),
            "--attempt", "1", "--partition", partition, "--node", node, "--host", spaces.address(index),
            "--interface", "eth0", "--roles", "tests.node.roles", "--grace", "3", "--on-cluster",
        ]  # fmt: skip
        log = run_dir.log(1, partition, int(node), "daemon").open("ab")
        daemons.append(subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=log, stderr=log))
    try:
        rendezvous = until(lambda: read_rendezvous(run_dir, 1), 200, "the lead daemon")
        client = Client(rendezvous.daemon, run_dir.read_token(), timeout=20)
        beating = lambda: [each for each in client.get("/registry")["daemons"] if each["beat_age"] < 10]  # noqa: E731
        until(lambda: len(beating()) == DAEMONS, 250, "every daemon beats", poll=0.3)
        up = time.monotonic() - began
        client.post("/stop", {})
        for process in daemons:
            process.wait(90)
        took = time.monotonic() - began
    finally:
        for process in daemons:
            process.kill()
    state = read_state(run_dir)
    assert state is not None and state.phase == "cancelled"
    assert {process.returncode for process in daemons} == {130}
    assert processes_of(run_dir.root) == []
    print(f"{DAEMONS} daemons: up in {up:.1f} s, gone after {took:.1f} s")
    # on a machine that others use too, the clock would time their work: then the daemons' own CPU time tells
    cpu_secs = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before
    assert took <= LIMIT_SECS or cpu_secs <= 0.8 * CORES * LIMIT_SECS, (up, took, cpu_secs)
