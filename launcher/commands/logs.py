"""logs: the end of every process's log of the last attempt, or the lines as they come."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from core.config import UserError
from launcher.commands.status import error_of, resume_line, status_text
from launcher.find_run import find_run
from launcher.liveness import look
from launcher.node.log_tail import tail
from launcher.run_dir import RunDir

POLL_SECS = 0.25
LIVENESS_SECS = 3.0


class NoLogError(UserError):
    """No such process in the run's last attempt."""


def run(arguments: argparse.Namespace) -> int:
    run_dir = find_run(arguments.run)
    state = look(run_dir).state
    attempt = run_dir.logs / str(state.attempt if state else 1)
    reader = Reader(attempt, arguments.process, arguments.node)
    if (arguments.process or arguments.node) and not reader.files():
        there = ", ".join(sorted(f"{path.parent.name}/{path.stem}" for path in attempt.glob("*/*.log"))) or "none yet"
        wanted = "/".join(word for word in (arguments.node, arguments.process) if word)
        raise NoLogError(f"no log of {wanted!r} in {attempt}; there is: {there}")
    for path in reader.files():
        for line in tail(path, lines=arguments.lines):
            print(f"{_label(path)} {line}")
        reader.offsets[path] = path.stat().st_size
    if arguments.follow:
        follow(run_dir, reader)
    found = look(run_dir)
    if found.dead:
        sys.stdout.flush()
        print(status_text(run_dir, found, time.time()), file=sys.stderr)
    elif not found.alive and error_of(run_dir, found) is not None:
        phase = found.state.phase if found.state else ""
        print(f"{phase}; go on with: {resume_line(run_dir, found.state)}", file=sys.stderr)
    return 0


class Reader:
    """Log files of one attempt, read on from where the last look ended; whole lines only."""

    def __init__(self, attempt: Path, process: str | None, node: str | None = None) -> None:
        self.attempt = attempt
        self.process = process
        self.node = node
        self.offsets: dict[Path, int] = {}

    def files(self) -> list[Path]:
        return sorted(
            path
            for path in self.attempt.glob("*/*.log")
            if self.process in (None, path.stem) and self.node in (None, path.parent.name)
        )

    def new_lines(self) -> list[tuple[Path, str]]:
        found = []
        for path in self.files():
            with path.open("rb") as file:
                file.seek(self.offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self.offsets[path] = self.offsets.get(path, 0) + len(whole)
            found += [(path, line) for line in whole.decode("utf-8", "replace").splitlines()]
        return found


def follow(run_dir: RunDir, reader: Reader) -> None:
    """Until the run is not alive any more, and all that it wrote has been printed."""
    next_look, alive = 0.0, True
    while alive:
        if time.monotonic() >= next_look:
            alive = look(run_dir).alive
            next_look = time.monotonic() + LIVENESS_SECS
        for path, line in reader.new_lines():
            print(f"{_label(path)} {line}")
        sys.stdout.flush()
        if alive:
            time.sleep(POLL_SECS)


def _label(path: Path) -> str:
    return f"[{path.parent.name}/{path.stem}]"
