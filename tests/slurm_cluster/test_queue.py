"""Where a run waits and who sends it: a long queue, and a user who is not root."""

from __future__ import annotations

import os
import pwd
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm_cluster.conftest import Run
from tests.support.runs import ROOT, environment, processes_of

pytestmark = pytest.mark.timeout(280)
Start = Callable[..., Run]


def test_a_queue_longer_than_every_start_up_deadline(run: Start) -> None:
    """AReaL counts the time in the queue against its start-up limit; here deadlines run from each component's start."""
    job = run("rollout.setup_timeout=15", "total_train_steps=1")
    with job.cluster.drained("1-4"):
        job.submit()
        assert processes_of(job.root) == [], "submit leaves nothing running"
        time.sleep(20)
        assert job.status()["verdict"] == "pending"
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
