"""Edits while a job is queued change nothing of what it runs; a chain goes on where its last job was stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm_cluster.conftest import Run
from tests.support.slurm_cluster.cluster import until

pytestmark = pytest.mark.timeout(240)


REWARD = """import time
def score(prompt, completion, prompt_ids, completion_ids, **row):
    time.sleep(0.2)
    return len(completion) % 3
"""


def test_code_of_the_submission_runs_and_a_chain_goes_on_where_its_last_job_was_stopped(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    """The user's reward is broken after `submit`: the job does not see it. Three jobs of a site that requeues nothing:
    the first is warned, the second ends the run, the third has nothing left to do.
    """
    reward = tmp_path / "my_reward.py"
    reward.write_text(REWARD)
    site = ("slurm.chain=3", "slurm.requeue=false", "slurm.snapshot_code=true")
    job = run("total_train_steps=6", "total_train_epochs=20", "reward=my_reward:score", *site)
    job.where = tmp_path
    with job.cluster.drained("1-4"):
        leader = job.submit()
        reward.write_text("raise SystemExit(1)\n")
    job.await_step(2)
    job.cluster.call("scancel", "--signal=USR2", leader)  # as Slurm does before a time limit
    assert job.await_phase("done").attempt == 2
    assert [record["step"] for record in job.steps if record["step"] > 0][-1] == 6
    assert (job.root / "code" / "launcher" / "slurm" / "task.py").is_file()
    assert str(job.root / "code") in (job.root / "submitit" / "job.sbatch").read_text()
    _, second, third = job.status()["jobs"]
    assert job.state.job_id == second
    until(lambda: not job.cluster.call("squeue", "-h", "-j", third, check=False), 60, "the chain's last job ends")
    assert "nothing left to do" in (job.root / "submitit" / f"{third}.out").read_text()
    assert job.state.attempt == 2
    job.launcher("audit", str(job.root)).expect()
    job.nothing_left()
