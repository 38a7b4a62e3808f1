"""Node daemons on a Slurm cluster: one job of one component per partition, sent through submitit.

Owns sending and cancelling. The job outlives this process; how it is doing is asked of Slurm (launcher.slurm.queue) and
of its lead daemon (launcher.liveness).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from submitit.core.plugins import get_executors

from core.config import load
from launcher.launch import REFUSED, Launch
from launcher.node.specs import REPOSITORY
from launcher.node.state import Phase, RunError, read_state, write_state
from launcher.run_dir import RunDir
from launcher.slurm import snapshot
from launcher.slurm.plugin import ComponentsExecutor, SubmissionError
from launcher.slurm.queue import scancel, write_jobs
from launcher.slurm.script import script_of
from launcher.slurm.task import NodeTask


@dataclass(frozen=True)
class Sent:
    """The jobs of one submission (several with slurm.chain)."""

    job_ids: list[str]
    shape: str
    why: str


class SlurmScheduler:
    def send(self, launch: Launch) -> Sent:
        run_dir, plan = launch.run_dir, launch.plan
        config = load(run_dir.config, [])
        if config.slurm.snapshot_code:
            snapshot.take(config, run_dir, Path.cwd())
        if ComponentsExecutor.name() not in get_executors():
            raise SubmissionError(
                "submitit does not see its plugin (entry points of vlm-rl): install the project again "
                f"(`pip install -e {REPOSITORY}`), and remove an old {REPOSITORY}/vlm_rl.egg-info if there is one"
            )
        job, text = script_of(config, plan, run_dir)
        executor = ComponentsExecutor(run_dir.submitit)
        tasks = [(each.name, each.size.nodes, NodeTask(str(run_dir.root), each.name)) for each in job.components]
        job_ids: list[str] = []
        for _ in range(job.chain):
            try:
                handles = executor.send(text, tasks, hetjob=job.kind == "hetjob")
            except SubmissionError as error:
                self._note_refusal(run_dir, str(error), job_ids)
                raise
            job_ids.append(handles[0].job_id.replace("+", ".").split(".")[0])
            write_jobs(run_dir, job_ids)
            self._note_first(run_dir, job_ids)
        return Sent(job_ids, plan.shape, plan.shape_why)

    @staticmethod
    def _note_refusal(run_dir: RunDir, why: str, job_ids: list[str]) -> None:
        """Nothing was started, or not all of a chain: the jobs that are there already are taken back."""
        scancel(job_ids)
        state = read_state(run_dir)
        assert state is not None
        write_state(run_dir, dataclasses.replace(state, phase=Phase.FAILED, error=RunError(REFUSED, why)))

    @staticmethod
    def _note_first(run_dir: RunDir, job_ids: list[str]) -> None:
        """Unless the job has started already and says so itself."""
        state = read_state(run_dir)
        if state is not None and state.job_id is None:
            write_state(run_dir, dataclasses.replace(state, job_id=job_ids[0]))
