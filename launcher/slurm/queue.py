"""Jobs as Slurm sees them: one squeue for all that are asked about, and one sacct for those it has forgotten.

Reads, and cancels whole jobs. Every command has a timeout; a cluster that does not answer is an answer of its own
(None), not an error.
"""

from __future__ import annotations

import getpass
import json
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass

from core.telemetry.files import write_atomic
from launcher.run_dir import RunDir
from launcher.slurm.states import Fate, Meaning, meaning

COMMAND_SECS = 30.0
FIELDS = ("%i", "%T", "%r", "%S", "%N", "%u", "%M", "%L", "%D")
ACCOUNTING = ("JobID", "State", "Reason", "Start", "NodeList", "User", "Elapsed", "ExitCode", "NNodes")
UNKNOWN = ("N/A", "None", "Unknown", "None assigned", "(null)", "")


@dataclass(frozen=True)
class Seen:
    """One component of a job (or the job), as last seen."""

    job_id: str
    state: str
    reason: str
    start: str
    nodes: str
    user: str
    elapsed: str
    left: str
    count: str

    @property
    def meaning(self) -> Meaning:
        return meaning(self.state)


@dataclass(frozen=True)
class JobView:
    job_id: str
    components: tuple[Seen, ...]

    @property
    def alive(self) -> bool:
        return any(each.meaning.alive for each in self.components)

    @property
    def fate(self) -> Fate:
        """What is furthest from a good end."""
        fates = [each.meaning.fate for each in self.components]
        order = (Fate.RUNNING, Fate.ENDING, Fate.WAITING, Fate.FAILED, Fate.CANCELLED, Fate.DONE)
        return next(fate for fate in order if fate in fates)


def leader(job_id: str) -> str:
    """12 of 12, 12+1, 12.inference, 12.0 or 12_3."""
    return job_id.replace("+", " ").replace(".", " ").replace("_", " ").split()[0]


def look_up(job_ids: Iterable[str]) -> dict[str, JobView] | None:
    """The jobs that Slurm still knows, by leader; None when it does not answer."""
    wanted = list(dict.fromkeys(leader(each) for each in job_ids))
    if not wanted:
        return {}
    rows = _squeue(wanted)
    if rows is None:
        return None
    forgotten = [each for each in wanted if each not in {leader(row.job_id) for row in rows}]
    if forgotten:
        rows += _sacct(forgotten)
    return {
        each: JobView(each, tuple(row for row in rows if leader(row.job_id) == each))
        for each in wanted
        if any(leader(row.job_id) == each for row in rows)
    }


def _squeue(job_ids: list[str]) -> list[Seen] | None:
    words = ["squeue", "-h", "-a", "--states=all", "-j", ",".join(job_ids), "-o", "|".join(FIELDS)]
    done = _call(words)
    if done is None:
        return None
    if done.returncode:
        return [] if "Invalid job id" in done.stderr else None
    return [_row(line) for line in done.stdout.splitlines() if line.count("|") == len(FIELDS) - 1]


def _sacct(job_ids: list[str]) -> list[Seen]:
    """A pending hetjob is one row; later every component has its own. Steps are left out."""
    words = ["sacct", "-n", "-P", "-X", "-o", ",".join(ACCOUNTING), "-j", ",".join(job_ids)]
    done = _call(words)
    if done is None or done.returncode:  # a site without accounting: what squeue has forgotten is unknown
        return []
    return [_row(line) for line in done.stdout.splitlines() if line.count("|") == len(ACCOUNTING) - 1]


def _row(line: str) -> Seen:
    return Seen(*("" if word.strip() in UNKNOWN else word.strip() for word in line.split("|")))


def _call(words: list[str]) -> subprocess.CompletedProcess[str] | None:
    if shutil.which(words[0]) is None:
        return None
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECS, check=False)
    except subprocess.TimeoutExpired:
        return None


# --- the jobs of a run


def write_jobs(run_dir: RunDir, job_ids: list[str]) -> None:
    write_atomic(run_dir.submitit / "jobs.json", json.dumps({"jobs": job_ids}))


def forget_jobs(run_dir: RunDir) -> None:
    """Those of an earlier attempt, which is over."""
    (run_dir.submitit / "jobs.json").unlink(missing_ok=True)


def jobs_of(run_dir: RunDir) -> list[str]:
    try:
        return list(json.loads((run_dir.submitit / "jobs.json").read_text())["jobs"])
    except FileNotFoundError:
        return []


def is_mine(views: dict[str, JobView]) -> bool:
    users = {seen.user for view in views.values() for seen in view.components if seen.user}
    return users <= {getpass.getuser()}


def scancel(job_ids: list[str]) -> None:
    """Whole jobs, by their leaders."""
    if job_ids:
        subprocess.run(["scancel", *job_ids], timeout=COMMAND_SECS, check=False, capture_output=True)


class Watch:
    """What Slurm said last; it is not asked about the same job again before `poll_secs` have passed."""

    def __init__(self, poll_secs: float = 10.0) -> None:
        self.poll_secs = poll_secs
        self._asked: dict[str, float] = {}
        self._views: dict[str, JobView] = {}
        self._silent = False

    def ask_for(self, job_ids: list[str]) -> None:
        """One question for all of them, so that none of them has to be asked about alone."""
        now = time.monotonic()
        due = [each for each in job_ids if now - self._asked.get(each, float("-inf")) >= self.poll_secs]
        if not due:
            return
        found = look_up(due)
        self._silent = found is None
        for each in due:
            self._asked[each] = time.monotonic()
            self._views.pop(each, None)
        self._views.update(found or {})

    def views(self, job_ids: list[str]) -> dict[str, JobView] | None:
        """None when Slurm does not answer."""
        self.ask_for(job_ids)
        return None if self._silent else {each: self._views[each] for each in job_ids if each in self._views}


WATCH = Watch()
"""Of this process."""
