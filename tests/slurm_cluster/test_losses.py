"""Daemons and nodes that are gone: named in `status` with their machine, in time; the job does not hold its nodes."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.slurm_cluster.conftest import Run
from tests.support.runs import processes_of
from tests.support.slurm_cluster.cluster import until

pytestmark = pytest.mark.timeout(400)
Start = Callable[..., Run]
LONG = ("total_train_steps=400", "total_train_epochs=200")


def daemon_of(run: Run, node: str) -> psutil.Process:
    """The task that is this node's daemon."""
    partition, _, index = node.rpartition("-")
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "submitit.core._submit" in words and str(run.root / "submitit") in words:
            variables = process.environ()
            if variables.get("VLM_RL_COMPONENT") == partition and variables.get("SLURM_PROCID") == index:
                return process
    raise AssertionError(f"no daemon of {node}")


@pytest.mark.parametrize("node", ["inference-0", "training-0"])
def test_a_killed_daemon_is_named_within_ten_seconds_and_ends_the_job(run: Start, node: str) -> None:
    """prime-rl#2574, NeMo-RL#1019: one component dies and the job holds its nodes."""
    job = run(*LONG, "slurm.requeue=false")
    job.submit()
    job.await_step(1)
    daemon = daemon_of(job, node)
    began = time.monotonic()
    daemon.send_signal(signal.SIGKILL)
    until(lambda: job.state.error is not None, 30, "the loss is written down")
    assert time.monotonic() - began <= 10
    assert job.state.error is not None and job.state.error.process == f"daemon of {node}"
    job.await_phase("failed")
    assert f"daemon of {node}" in job.launcher("status", str(job.root)).expect().out
    job.await_out_of_queue()
    job.nothing_left()


@contextlib.contextmanager
def lost(job: Run, node: str) -> Iterator[int]:
    """The node is gone, and named in `status` long before Slurm notices, by the heartbeat alone. Its index."""
    job.await_step(2)
    host = job.host_of(node)
    index = job.cluster.shape.names.index(host) + 1
    began = time.monotonic()
    job.cluster.kill_node(index)
    try:
        until(lambda: job.state.error is not None, 60, "the loss is written down")
        noticed = time.monotonic() - began
        text = job.launcher("status", str(job.root)).expect().out
        assert f"daemon of {node}: on {host}: no heartbeat for" in text
        assert noticed <= 45, noticed
        yield index
    finally:
        job.cluster.start_node(index)


def end(job: Run) -> None:
    job.launcher("cancel", str(job.root)).expect()
    job.launcher("audit", str(job.root)).expect()
    job.await_out_of_queue()
    job.nothing_left()


def await_requeue(job: Run, leader: str) -> None:
    until(lambda: job.requeues(leader) == 1, 90, "the job asks for one requeue")
    until(lambda: processes_of(job.root) == [], 30, "the attempt is over, its sruns too")


def test_a_lost_node_is_named_within_45_seconds_and_the_job_asks_for_a_requeue(run: Start) -> None:
    job = run("allocation_mode=embedded:d2+archon:d1", "cluster.n_nodes=3", *LONG)
    leader = job.submit()
    with lost(job, "inference-1") as index:
        await_requeue(job, leader)
        job.cluster.notice_lost_node(index)
    end(job)


@pytest.mark.slow
@pytest.mark.parametrize("node", ["inference-1", "inference-0"])
def test_the_attempt_after_a_lost_node_does_without(run: Start, node: str) -> None:
    """The batch script of inference-0 dies with its node: there Slurm takes the job back itself."""
    job = run("allocation_mode=embedded:d2+archon:d1", "cluster.n_nodes=3", *LONG)
    leader = job.submit()
    with lost(job, node) as index:
        if node != "inference-0":
            await_requeue(job, leader)
        job.cluster.notice_lost_node(index)
        job.await_attempt(2)
        before = len(job.steps)
        # 22.05 may have lost the GPUs of a component whose node went down after the requeue ("_step_get_gres_cnt: node
        # offset invalid"): its step is refused once, and one attempt more is needed
        job.await_step(before + 1, 180)
    end(job)


def test_a_lost_node_whose_srun_returned_0_is_named_and_the_run_goes_on(run: Start) -> None:
    """Here Slurm notices first: it ends the dead node's step with 0, warns the rest and takes the whole job back."""
    job = run(*LONG)
    leader = job.submit()
    job.await_step(2)
    host = job.host_of("training-0")
    index = job.cluster.shape.names.index(host) + 1
    began = time.monotonic()
    job.cluster.kill_node(index)
    try:
        others = ",".join(str(number) for number in range(1, 5) if number != index)
        with job.cluster.drained(others):
            job.cluster.notice_lost_node(index)
            until(lambda: job.state.error is not None, 60, "the loss is written down")
            noticed = time.monotonic() - began
            text = job.launcher("status", str(job.root)).expect().out
            assert "step of training" in text and f"Slurm lost a node of {host}" in text
            assert noticed <= 45, noticed
        job.await_attempt(2)
        before = len(job.steps)
        job.await_step(before + 1)
    finally:
        job.cluster.start_node(index)
    assert "training 0" in (job.root / "submitit" / f"{leader}.out").read_text()
    end(job)
