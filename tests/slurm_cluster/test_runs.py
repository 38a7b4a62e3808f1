"""Whole runs on a real Slurm: sent, seen, followed, reported, cancelled; nothing is left on any node."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.slurm.plugin import ComponentsJob
from tests.slurm_cluster.conftest import Run
from tests.support.slurm_cluster.cluster import until

pytestmark = pytest.mark.timeout(240)
Start = Callable[..., Run]


def test_a_hetjob_over_two_nodes_from_submit_to_report(run: Start) -> None:
    job = run("total_train_steps=3")
    job.env = {"http_proxy": "http://192.0.2.1:9", "HTTP_PROXY": "http://192.0.2.1:9"}  # nobody is there
    printed = job.launcher("plan", "--sbatch", "--emulate", *job.words).expect().out
    planned = job.launcher("plan", "--emulate", *job.words).expect().out
    assert "hetjob: each partition has nodes of its own" in planned
    leader = job.submit()
    assert (job.root / "submitit" / "job.sbatch").read_text() == printed
    assert printed.count("#SBATCH hetjob") == 1
    until(lambda: job.state.phase == "running", 60, "running")
    status = job.status()
    seen = status["jobs"][leader]
    assert [each["job_id"] for each in seen] == [f"{leader}+0", f"{leader}+1"]
    assert len({each["nodes"] for each in seen}) == 2
    said = job.launcher("logs", str(job.root), "-f", "--node", "training-0", timeout=120).expect()
    assert "[training-0/rank-0]" in said.out and "[inference-0/" not in said.out
    assert job.await_phase("done").attempt == 1
    assert [each["step"] for each in job.steps] == [1, 2, 3]
    summary = json.loads(job.launcher("report", str(job.root), "--json").expect().out)
    assert summary["steps"] == 3
    job.await_out_of_queue()
    job.nothing_left()
    assert "done" in job.launcher("list", str(job.shared / "runs")).expect().out
    handles = [ComponentsJob(job.root / "submitit", f"{leader}+{index}") for index in (0, 1)]
    assert [handle.state for handle in handles] == ["COMPLETED", "COMPLETED"]
    assert [handle.result()["node"] for handle in handles] == ["inference-0", "training-0"]
    assert ComponentsJob.watcher.num_calls <= 2, "one question for all components"
    states = job.cluster.call("sacct", "-n", "-X", "-P", "-o", "State", "-j", leader).split()
    assert states == ["COMPLETED", "COMPLETED"]


@pytest.fixture
def apptainer(tmp_path: Path) -> Path:
    """Stands in for the program: takes its words, and runs what follows the image where it is."""
    made = tmp_path / "apptainer"
    made.write_text('#!/bin/bash\n[ "$1" = exec ] || exit 9\nwhile [ "$1" != /image.sif ]; do shift; done\n"${@:2}"\n')
    made.chmod(0o755)
    return made


def test_two_and_two_nodes_and_one_job_of_two_steps_beside_them(run: Start, apptainer: Path) -> None:
    """Four nodes for the hetjob; the other waits for one of them, asks for partial nodes and shares it in two steps,
    each in a container.
    """
    wide = run("allocation_mode=embedded:d2+archon:d2", "cluster.n_nodes=4", "total_train_steps=2", name="-wide")
    wide.submit()
    container = ("slurm.container=apptainer", "slurm.container_image=/image.sif", "slurm.container_mounts=[/tmp:/tmp]")
    narrow = run("cluster.n_nodes=1", "cluster.n_gpus_per_node=2", "total_train_steps=2", *container, name="-narrow")
    narrow.env = {"PATH": f"{apptainer.parent}:{os.environ['PATH']}"}
    printed = narrow.launcher("plan", "--sbatch", "--emulate", *narrow.words).expect().out
    leader = narrow.submit()
    assert wide.await_phase("done").attempt == 1
    assert narrow.await_phase("done").attempt == 1
    script = (narrow.root / "submitit" / "job.sbatch").read_text()
    assert script == printed
    assert "#SBATCH --gres=gpu:2" in script and script.count("srun --exact") == 2 and "hetjob" not in script
    records = {path.stem: json.loads(path.read_text()) for path in narrow.root.glob("logs/1/preflight/*.json")}
    given = [gpu["name"] for record in records.values() for gpu in record["gpus"]]
    assert len(given) == len(set(given)) == 2, records
    assert len({record["host"] for record in records.values()}) == 1
    hosts = [json.loads(path.read_text())["host"] for path in wide.root.glob("logs/1/preflight/*.json")]
    assert len(set(hosts)) == 4
    for job in (wide, narrow):
        job.await_out_of_queue()
        job.nothing_left()
    steps = narrow.cluster.call("sacct", "-n", "-P", "-o", "JobID,State,AllocTRES", "-j", leader).splitlines()
    assert sum(".0|" in line or ".1|" in line for line in steps) == 2


@contextlib.contextmanager
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's process, named like one of a run's own."""
    words = ["bash", "-c", "exec -a 'python -P -m launcher.roles.embedded_server' sleep 300"]
    with subprocess.Popen(words) as process:
        yield process
        process.kill()


def test_cancel_while_pending_and_while_running(run: Start) -> None:
    first = run("total_train_steps=200", "total_train_epochs=50", name="-first")
    with first.cluster.drained("3-4"):
        first.submit()
        waiting = run("total_train_steps=200", "slurm.exclusive=true", name="-waiting")
        job = waiting.submit()
        first.await_step(1)
        text = first.launcher("status", str(first.root)).expect().out
        assert all(words in text for words in (
            "attempt 1, generation 0, step ", "inference: runs on ", "training: runs on ", "servers up: 1 of 1",
            "ends in about",
        )), text  # fmt: skip
        status = waiting.status()
        assert status["verdict"] == "pending" and status["alive"]
        text = waiting.launcher("status", str(waiting.root)).expect().out
        assert "waits in the queue" in text and ("Resources" in text or "Priority" in text or "Nodes" in text), text
        assert "cancelled" in waiting.launcher("cancel", str(waiting.root)).expect().out
        assert waiting.state.phase == "cancelled"
        until(lambda: not waiting.cluster.call("squeue", "-h", "-j", job, check=False), 20, "gone from the queue")
        assert waiting.status()["verdict"] == "cancelled"

        with stranger() as theirs:
            assert "cancelled" in first.launcher("cancel", str(first.root)).expect().out
            assert theirs.poll() is None, "a process was ended for its name"
        assert first.state.phase == "cancelled"
        first.await_out_of_queue()
        first.nothing_left()
        again = len(first.steps) + 2
        first.launcher("resume", "--detach", str(first.root), f"total_train_steps={again}").expect()
        assert first.await_phase("done", "failed").phase == "done"
        assert first.state.attempt == 2 and [record["step"] for record in first.steps][-1] == again
        first.await_out_of_queue()
        first.nothing_left()
