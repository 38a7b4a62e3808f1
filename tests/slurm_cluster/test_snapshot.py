"""Edits while a job is queued change nothing of what it runs; a chain goes on where its last job was stopped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm_cluster.conftest import Run
from tests.support.slurm_cluster.cluster import until

pytestmark = pytest.mark.timeout(240)


def test_code_of_the_submission_runs_and_a_chain_has_nothing_left_to_do(
    run: Callable[..., Run], tmp_path: Path
) -> None:
    """The user's reward is broken after `submit`: the job does not see it. Its second job of two ends at once."""
    reward = tmp_path / "my_reward.py"
    reward.write_text(
        "def score(prompt, completion, prompt_ids, completion_ids, **row):\n    return len(completion) % 3\n"
    )
    job = run("total_train_steps=1", "reward=my_reward:score", "slurm.snapshot_code=true", "slurm.chain=2")
    job.where = tmp_path
    with job.cluster.drained("1-4"):
        leader = job.submit()
        reward.write_text("raise SystemExit(1)\n")
    assert job.await_phase("done").attempt == 1
    assert (job.root / "code" / "launcher" / "slurm" / "task.py").is_file()
    assert str(job.root / "code") in (job.root / "submitit" / "job.sbatch").read_text()
    second = [each for each in job.status()["jobs"] if each != leader]
    assert len(second) == 1
    until(lambda: not job.cluster.call("squeue", "-h", "-j", second[0], check=False), 60, "the chain's second job ends")
    assert "nothing left to do" in (job.root / "submitit" / f"{second[0]}.out").read_text()
    assert job.state.attempt == 1
    job.nothing_left()
