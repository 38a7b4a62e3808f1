"""submitit's plugin: an executor for jobs of several components, their environment, and a watcher of squeue and sacct.

Named in setup.cfg under the entry points of group `submitit`. submitit knows one job, one pickle, one set of tasks; a
component here has an id of its own, `<leader>+<group>` in a hetjob and `<job>.<name>` where the components are steps of
one job, so that every component has its own pickles.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from submitit.core import core, utils
from submitit.core.job_environment import JobEnvironment
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob

from core.config import UserError
from launcher.slurm.queue import leader, look_up

SBATCH_SECS = 120.0


class SubmissionError(UserError):
    """Slurm refused the job; the message is sbatch's own."""


class ComponentsWatcher(SlurmInfoWatcher):
    """squeue knows what runs and what ended of late, sacct what ended before; a site may lack either."""

    def update(self) -> None:
        waiting = self._registered - self._finished
        if not waiting:
            return
        self._num_calls += 1
        for job_id, view in (look_up(waiting) or {}).items():
            for seen in view.components:
                self._info_dict[seen.job_id] = {"JobID": seen.job_id, "State": seen.state, "NodeList": seen.nodes}
            first = view.components[0]
            info = {"JobID": job_id, "State": first.state, "NodeList": first.nodes}
            for each in waiting:
                # a pending hetjob is one row in sacct; a step of one job shares the job's state
                if leader(each) == job_id and each not in {seen.job_id for seen in view.components}:
                    self._info_dict[each] = info
        self._last_status_check = core._time.time()
        self._finished |= {each for each in waiting if self.is_done(each, mode="cache")}


class ComponentsJob(SlurmJob[Any]):
    watcher = ComponentsWatcher(delay_s=60)


class ComponentsJobEnvironment(JobEnvironment):
    """Inside a task. SLURM_JOB_ID is the leader's in every component, so the script tells which one this is."""

    _env: ClassVar[dict[str, str]] = {
        "job_id": "SLURM_JOB_ID",
        "num_tasks": "SLURM_STEP_NUM_TASKS",
        "num_nodes": "SLURM_STEP_NUM_NODES",
        "node": "SLURM_NODEID",
        "global_rank": "SLURM_PROCID",
        "local_rank": "SLURM_LOCALID",
    }

    @property
    def component(self) -> str:
        return os.environ["VLM_RL_COMPONENT"]

    @property
    def job_id(self) -> str:
        if "SLURM_HET_SIZE" in os.environ:
            return f"{self.raw_job_id}+{os.environ['VLM_RL_HET_GROUP']}"
        return f"{self.raw_job_id}.{self.component}"

    def _handle_signals(self, paths: utils.JobPaths, submission: utils.DelayedSubmission) -> None:
        """The node daemon answers TERM and USR2 itself; what a killed attempt left half-written is in nobody's way."""
        result = paths.result_pickle
        for path in (result, result.with_suffix(result.suffix + ".save_tmp")):
            path.unlink(missing_ok=True)
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, _leave)

    def _requeue(self, countdown: int) -> None:
        """Never by a task: the batch script asks once for the whole job."""


def _leave(number: int, frame: object) -> None:
    """Before the daemon is up there is nothing to save."""
    raise SystemExit(85)


class ComponentsExecutor(SlurmExecutor):
    """Sends one script with one callable for each component; `parameters` of submitit have no part in it."""

    job_class = ComponentsJob

    def send(
        self, text: str, tasks: Sequence[tuple[str, int, Callable[[], Any]]], *, hetjob: bool
    ) -> list[ComponentsJob]:
        """One handle per component. The job is held until its pickles are in place, so that it cannot start first."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        script = self.folder / "job.sbatch"
        script.write_text(text)
        job = self._sbatch(["--hold", str(script)])
        handles = []
        try:
            for index, (name, count, task) in enumerate(tasks):
                handle = ComponentsJob(self.folder, f"{job}+{index}" if hetjob else f"{job}.{name}", range(count))
                pickled = Path(f"{handle.paths.submitted_pickle}.new")
                utils.DelayedSubmission(task).dump(pickled)
                handle.paths.move_temporary_file(pickled, "submitted_pickle")
                handles.append(handle)
            _command(["scontrol", "release", job])
        except BaseException:
            subprocess.run(["scancel", job], timeout=SBATCH_SECS, check=False)
            raise
        return handles

    @staticmethod
    def _sbatch(words: Sequence[str]) -> str:
        return SlurmExecutor._get_job_id_from_submission_command(_command(["sbatch", *words]))


def outside_of_jobs() -> dict[str, str]:
    """Submitted from inside another job (salloc, a notebook), its sizes would become defaults of this one's steps."""
    return {key: value for key, value in os.environ.items() if not key.startswith("SLURM_") or key == "SLURM_CONF"}


def _command(words: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            list(words), capture_output=True, text=True, timeout=SBATCH_SECS, check=False, env=outside_of_jobs()
        )
    except FileNotFoundError as error:
        raise SubmissionError(
            f"{words[0]} is not on this machine: submit where Slurm is, or scheduler.type=local"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SubmissionError(f"{words[0]} did not answer within {SBATCH_SECS:.0f} s") from error
    if done.returncode:
        raise SubmissionError(f"{' '.join(words)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
