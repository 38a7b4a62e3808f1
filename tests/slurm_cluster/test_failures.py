"""What a cluster does to a run: preemption, time limits, lost nodes, killed processes, long queues. The run goes on."""

from __future__ import annotations

import os
import pwd
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.slurm_cluster.conftest import Run
from tests.support.runs import ROOT, environment, lines
from tests.support.slurm_cluster.cluster import until

pytestmark = pytest.mark.timeout(280)
Start = Callable[..., Run]
STEPS = ("total_train_steps=12", "total_train_epochs=50")
EXACT = ("deterministic=true", "rollout.max_head_offpolicyness=0")


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


def trained_places(run: Run) -> list[tuple[int, int]]:
    """Epoch and position of every group, in the order of the index; each stands there once if it was trained once."""
    return [(group["epoch"], group["position"]) for group in lines(run.root / "rollouts" / "index.jsonl")]


def test_preemption_by_a_higher_partition_then_resume_bit_for_bit(run: Start) -> None:
    whole = run(*STEPS, *EXACT, "slurm.exclude=node[1-2]", name="-whole")
    whole.submit()
    broken = run(*STEPS, *EXACT, "slurm.exclude=node[3-4]", name="-broken")
    job = broken.submit()
    broken.await_step(2)
    nodes = broken.cluster.call("squeue", "-h", "-j", job, "-o", "%N").split()
    words = ["sbatch", "--parsable", "-p", "high", "-w", ",".join(nodes), "-N", str(len(nodes)), "--exclusive"]
    high = broken.cluster.call(*words, "--mem=100", "-t", "5", "--output=/dev/null", "--wrap", "sleep 300")
    until(lambda: broken.cluster.call("squeue", "-h", "-j", high, "-o", "%T") == "RUNNING", 90, "the higher job runs")
    assert broken.state.phase == "preempted"
    assert broken.status()["verdict"] == "pending"
    broken.cluster.call("scancel", high)
    broken.await_attempt(2)
    assert broken.await_phase("done").attempt == 2
    whole.await_phase("done")
    assert [record["step"] for record in broken.steps if record["step"] > 0][-1] == 12
    places = trained_places(broken)
    assert sorted(places) == sorted(set(places)) == sorted(trained_places(whole))
    broken.launcher("audit", str(broken.root)).expect()
    mine, other = (load_file(each) for each in (_weights(broken), _weights(whole)))
    assert mine.keys() == other.keys()
    assert all(mine[name].equal(other[name]) for name in mine)
    for each in (whole, broken):
        each.await_out_of_queue()
        each.nothing_left()


def _weights(run: Run) -> Path:
    return next((run.root / "hub" / "step-12").glob("*.safetensors"))


def test_a_time_limit_asks_for_one_requeue_and_the_run_goes_on(run: Start) -> None:
    """submitit#1656: with a limit under 10 minutes its own environment takes every USR2 for a timeout."""
    job = run("total_train_steps=2000", "total_train_epochs=2000", "slurm.time=1", "slurm.signal_lead_secs=15")
    leader = job.submit()
    job.await_attempt(2, 150)
    job.await_step(1, 120)
    attempt, before = job.state.attempt, len(job.steps)
    job.await_step(before + 1, 150)
    job.launcher("cancel", str(job.root)).expect()
    log = (job.root / "submitit" / f"{leader}.out").read_text()
    assert log.count("is requeued\n") == job.state.attempt - 1 >= attempt - 1 >= 1, log
    numbers = [record["step"] for record in job.steps]
    assert numbers == sorted(set(numbers)), "a step was recorded twice, or out of order"
    places = trained_places(job)
    assert sorted(places) == sorted(set(places))
    job.await_out_of_queue()
    job.nothing_left()


def test_a_killed_component_is_named_within_ten_seconds(run: Start) -> None:
    """prime-rl#2574, NeMo-RL#1019: one component dies and the job holds its nodes."""
    job = run(*STEPS, "total_train_steps=400", "total_train_epochs=200", "slurm.requeue=false")
    job.submit()
    job.await_step(1)
    daemon_of(job, "inference-0").send_signal(signal.SIGKILL)
    began = time.monotonic()
    until(lambda: job.state.error is not None, 30, "the loss is written down")
    assert time.monotonic() - began <= 12
    assert job.state.error is not None and job.state.error.process == "daemon of inference-0"
    job.await_phase("failed")
    text = job.launcher("status", str(job.root)).expect().out
    assert "daemon of inference-0" in text
    job.await_out_of_queue()
    job.nothing_left()


def test_a_lost_node_is_named_within_45_seconds_and_the_next_attempt_resumes(run: Start) -> None:
    """Its slurmd and everything on it die, as when the power fails; srun of that component may even return 0."""
    job = run(*STEPS, "total_train_steps=400", "total_train_epochs=200")
    leader = job.submit()
    job.await_step(2)
    host = next(seen["nodes"] for seen in job.status()["jobs"][leader] if seen["job_id"].endswith("+0"))
    other = next(seen["nodes"] for seen in job.status()["jobs"][leader] if seen["job_id"].endswith("+1"))
    index = job.cluster.shape.names.index(other) + 1
    assert host != other
    began = time.monotonic()
    job.cluster.kill_node(index)
    try:
        until(
            lambda: job.state.attempt > 1 or job.state.phase in ("failed", "preempted") or job.state.error is not None,
            100, "the loss is noticed",
        )  # fmt: skip
        noticed = time.monotonic() - began
    finally:
        job.cluster.start_node(index)
    job.await_out_of_queue_or_attempt(2)
    if job.state.attempt == 1:  # the site did not requeue it
        job.launcher("resume", "--detach", str(job.root)).expect()
        job.await_attempt(2)
    before = len(job.steps)
    job.await_step(before + 1)
    job.launcher("cancel", str(job.root)).expect()
    places = trained_places(job)
    assert sorted(places) == sorted(set(places))
    assert noticed <= 60, noticed
    job.await_out_of_queue()
    job.nothing_left()


def test_a_queue_longer_than_every_start_up_deadline(run: Start) -> None:
    """AReaL counts the time in the queue against its start-up limit; here deadlines run from each component's start."""
    job = run("rollout.setup_timeout=15", "total_train_steps=1")
    job.cluster.call("scontrol", "update", "NodeName=node[1-4]", "State=DRAIN", "Reason=test")
    try:
        job.submit()
        time.sleep(20)
        assert job.status()["verdict"] == "pending"
    finally:
        job.cluster.call("scontrol", "update", "NodeName=node[1-4]", "State=RESUME")
    assert job.await_phase("done").attempt == 1
    job.await_out_of_queue()
    job.nothing_left()


@pytest.fixture
def interpreter_for_all() -> Iterator[None]:
    """Where root's own interpreter lies below a closed directory, others may pass through it during this test."""
    real = Path(os.path.realpath(sys.executable))
    closed = [each for each in [*real.parents, *ROOT.parents] if not each.stat().st_mode & stat.S_IXOTH]
    for each in closed:
        each.chmod(each.stat().st_mode | stat.S_IXOTH)
    yield
    for each in closed:
        each.chmod(each.stat().st_mode & ~stat.S_IXOTH)


def test_a_user_who_is_not_root(run: Start, shared: Path, interpreter_for_all: None) -> None:
    nobody = pwd.getpwnam("nobody")
    job = run("total_train_steps=1")
    for name in ("runs", "cache"):
        (shared / name).mkdir(exist_ok=True)
        (shared / name).chmod(0o1777)
    (shared / "runs" / "slurm").mkdir(exist_ok=True)
    (shared / "runs" / "slurm").chmod(0o1777)

    def as_nobody(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["setpriv", f"--reuid={nobody.pw_uid}", f"--regid={nobody.pw_gid}", "--clear-groups", "--", *words],
            cwd=ROOT, env={**environment(job.cluster.environment), "HOME": "/nonexistent", "TMPDIR": "/tmp"},
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip

    python = [sys.executable, "-P", "-m", "launcher"]
    done = as_nobody(*python, "submit", "--emulate", *job.words)
    assert done.returncode == 0, done.stderr
    refused = job.launcher("cancel", str(job.root))
    assert refused.status == 2 and "not yours" in refused.err
    assert job.await_phase("done").attempt == 1
    assert job.root.stat().st_uid == nobody.pw_uid
    assert (job.root / "token").stat().st_mode & 0o777 == 0o600
    assert "done" in as_nobody(*python, "status", str(job.root)).stdout
    job.await_out_of_queue()
    job.nothing_left()
