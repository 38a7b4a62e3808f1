"""Runs of the real command line on tiny models: start one, wait for it, read what it wrote, count what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    status: int
    out: str
    err: str

    def expect(self, status: int = 0) -> Ended:
        assert self.status == status, f"exit {self.status}\n{self.out[-4000:]}\n{self.err[-6000:]}"
        return self


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(extra or {})}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "launcher", *arguments]


def launcher(*arguments: str, timeout: float = 120, cwd: Path = ROOT) -> Ended:
    done = subprocess.run(
        command(*arguments),
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps(run: Path) -> list[dict[str, Any]]:
    """The step records of a run's metrics, in order."""
    return [record for record in lines(run / "metrics.jsonl") if record["kind"] == "step"]


def processes_of(run: Path) -> list[str]:
    """Command lines of living processes that name the run directory."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(run) in word for word in words):
            found.append(" ".join(words))
    return found


def await_gone(run: Path, seconds: float = 30.0) -> None:
    """Returns once no process of the run is left; fails with their command lines after `seconds`."""
    deadline = time.monotonic() + seconds
    while left := processes_of(run):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def log_tails(run: Path, characters: int = 3000) -> str:
    """The ends of all logs of a run, for the message of a failed assertion."""
    return "\n".join(f"── {path}\n{path.read_text()[-characters:]}" for path in sorted(run.glob("logs/**/*.log")))
