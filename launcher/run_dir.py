"""Every path of a run, in one place.

Owns the names below a run directory and its creation; it reads and writes no file but the token.
"""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from core.config.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
FULL_BYTES = 1 << 20


class RunDirError(UserError):
    """A run directory cannot be used; the message says which and what to do."""


class _Below:
    """A fixed path below the root."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def __get__(self, run: RunDir, owner: type[RunDir]) -> Path:
        return run.root.joinpath(*self.parts)


@dataclass(frozen=True)
class RunDir:
    root: Path

    config = _Below("config.yaml")
    plan = _Below("plan.json")
    rendezvous = _Below("rendezvous.json")
    state = _Below("state.json")
    token = _Below("token")
    logs = _Below("logs")
    weights = _Below("weights")
    checkpoints = _Below("checkpoints")
    hub = _Below("hub")
    code = _Below("code")
    submitit = _Below("submitit")
    batches = _Below("rollouts", "batches")
    images = _Below("rollouts", "images")
    index = _Below("rollouts", "index.jsonl")
    void = _Below("void.jsonl")
    metrics = _Below("metrics.jsonl")
    tb = _Below("tb")

    def log_file(self, attempt: int, partition: str, node: int, process: str) -> Path:
        """The one log file of a process of an attempt."""
        return self.logs / str(attempt) / f"{partition}-{node}" / f"{process}.log"

    def log(self, attempt: int, partition: str, node: int, process: str) -> Path:
        """The same, to write it: its directory is there afterwards, if the run's own is."""
        path = self.log_file(attempt, partition, node, process)
        if self.root.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return path

    def ailment(self) -> str:
        """What is wrong with the directory itself, during a run; empty where nothing is."""
        try:
            if not self.config.exists():
                return f"files of {self.root} were removed during the run"
            found = os.statvfs(self.root)
        except OSError:  # storage that is away: a stale handle, a server that does not answer
            return ""
        full = found.f_blocks > 0 and found.f_bavail * found.f_frsize < FULL_BYTES  # some tell no sizes at all
        return f"{self.root} lies on a file system without free space: free some" if full else ""

    def unwritable(self, path: Path, error: OSError) -> str:
        """What a person reads when a file of the run cannot be written."""
        try:
            there = self.root.is_dir()
        except OSError:
            there = False
        if not there:
            return f"{self.root} is gone: it was removed during the run, or its storage is not there any more"
        full = error.errno in FULL
        return f"{path} cannot be written: {error.strerror}" + ("; free some space there" if full else "")

    def user_code(self) -> Path:
        """Where the user's own modules are: as they were at submission (slurm.snapshot_code), else where he works."""
        kept = self.code / "user"
        return kept if kept.is_dir() else Path.cwd()

    def create(self) -> None:
        """Makes the directories (0700) and the token (0600); what is there already stays."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.root.chmod(0o700)
            for path in (self.logs, self.weights, self.checkpoints, self.hub, self.batches, self.images, self.tb):
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._create_token()
        except OSError as error:
            raise RunDirError(
                f"the run directory {self.root} cannot be made: {error.strerror or error}\n"
                "  cluster.fileroot must be a directory you may write, on storage that every node sees"
            ) from error

    def _create_token(self) -> None:
        if self.token.exists():
            self.token.chmod(0o600)
            return
        scratch = self.root / f".token.{os.getpid()}"
        handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(handle, secrets.token_hex(32).encode())
            os.fsync(handle)
        finally:
            os.close(handle)
        scratch.rename(self.token)

    def read_token(self) -> str:
        try:
            return self.token.read_text().strip()
        except OSError as error:
            reason = f"{self.token} cannot be read ({error.strerror}); is {self.root} a run directory?"
            raise RunDirError(reason) from error


def run_dir_of(fileroot: str | Path, experiment_name: str, trial_name: str) -> RunDir:
    return RunDir(Path(fileroot).expanduser().absolute() / experiment_name / trial_name)
