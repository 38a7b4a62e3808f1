"""A run that the cluster breaks off is, in the end, the run that nobody touched: bit for bit, and every prompt once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.broken_runs import differences, outcome
from tests.slurm_cluster.conftest import Run
from tests.support.slurm_cluster.cluster import Cluster, until

pytestmark = pytest.mark.timeout(400)
Start = Callable[..., Run]
STEPS = 8
EXACT = (
    f"total_train_steps={STEPS}", "total_train_epochs=50", f"saver.freq_steps={STEPS}", "deterministic=true",
    "rollout.max_head_offpolicyness=0",
)  # fmt: skip
LATE = """import time
def spread(prompt, completion, prompt_ids, completion_ids, **row):
    return sum(token % 2 == 0 for token in completion_ids) / max(1, len(completion_ids))
def slow(*args, **row):
    time.sleep(0.2)
    return spread(*args, **row)
def slower(*args, **row):
    time.sleep(0.7)
    return spread(*args, **row)
"""
"""The scores of configs.spread_reward, late: the cluster has time to break in."""


@pytest.fixture(scope="module")
def whole(cluster: Cluster, shared: Path) -> Iterator[Run]:
    made = Run(cluster, shared, "whole", list(EXACT))
    made.submit()
    made.await_phase("done")
    yield made
    made.nothing_left()


@pytest.fixture
def broken(run: Start, tmp_path: Path) -> Start:
    (tmp_path / "late.py").write_text(LATE)

    def start(*overrides: str) -> Run:
        made = run(*EXACT, *overrides)
        made.where = tmp_path
        return made

    return start


def assert_same(broken: Run, whole: Run) -> None:
    """Weights, trained samples in their order, metrics but times; and `audit` finds every prompt trained once."""
    assert [record["step"] for record in broken.steps if record["step"] > 0][-1] == STEPS
    broken.launcher("audit", str(broken.root)).expect()
    found = differences(outcome(whole.root, STEPS), outcome(broken.root, STEPS))
    assert not found, "\n".join(found)
    broken.await_out_of_queue()
    broken.nothing_left()


def test_preemption_by_a_higher_partition(broken: Start, whole: Run) -> None:
    job = broken("reward=late:slow")
    leader = job.submit()
    job.await_step(2)
    nodes = job.cluster.call("squeue", "-h", "-j", leader, "-o", "%N").split()
    words = ["sbatch", "--parsable", "-p", "high", "-w", ",".join(nodes), "-N", str(len(nodes)), "--exclusive"]
    high = job.cluster.call(*words, "--mem=100", "-t", "5", "--output=/dev/null", "--wrap", "sleep 300")
    until(lambda: job.cluster.call("squeue", "-h", "-j", high, "-o", "%T") == "RUNNING", 90, "the higher job runs")
    assert job.state.phase == "preempted"
    assert job.status()["verdict"] == "pending"
    job.cluster.call("scancel", high)
    job.await_attempt(2)
    assert job.await_phase("done").attempt == 2
    assert_same(job, whole)


def test_a_time_limit_under_ten_minutes_asks_for_one_requeue(broken: Start, whole: Run) -> None:
    """submitit#1656: with a limit under 10 minutes its own environment takes every USR2 for a timeout."""
    job = broken("reward=late:slower", "slurm.time=1", "slurm.signal_lead_secs=15")
    leader = job.submit()
    until(lambda: job.requeues(leader) == 1, 150, "the job asks for one requeue")
    for component in (leader, f"{leader}+1"):  # no second warning, which would only take time
        job.cluster.call("scontrol", "update", f"JobId={component}", "TimeLimit=30")
    assert job.await_phase("done", seconds=200).attempt == 2
    assert job.requeues(leader) == 1
    assert_same(job, whole)


@pytest.mark.slow  # its end, after Slurm has noticed, is to be seen passing before CI waits for it
def test_the_lead_daemons_node_is_lost(broken: Start, whole: Run) -> None:
    """Who lost the lead writes it down, long before Slurm notices; when Slurm has, the job goes on elsewhere."""
    job = broken("reward=late:slow")
    job.submit()
    job.await_step(2)
    host = job.host_of("training-0")
    index = job.cluster.shape.names.index(host) + 1
    began = time.monotonic()
    job.cluster.kill_node(index)
    try:
        until(lambda: job.state.error is not None, 60, "the loss is written down")
        noticed = time.monotonic() - began
        text = job.launcher("status", str(job.root)).expect().out
        assert f"daemon of training-0: on {host}: its registry is lost" in text
        assert noticed <= 45, noticed
        job.cluster.notice_lost_node(index)
        job.await_attempt(2)
    finally:
        job.cluster.start_node(index)
    assert job.await_phase("done", seconds=180).attempt >= 2
    assert_same(job, whole)
