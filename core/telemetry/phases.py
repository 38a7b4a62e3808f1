"""What this process is doing: one phase at a time, announced where it changes and read by its node daemon.

Owns the announcement (a small file of fixed size in node-local memory: name, detail, since when, how many) and, for
tests, the one fault point of the process. VLM_RL_FAULT="<process>:<phase>:<n>:<kill|stop|cut>:<file>" makes the n-th
time that this process reaches that phase its last: killed, stopped, or with every connection shut down. Whoever does it
creates <file> first, so that it happens once in a run. It judges nothing: deadlines are the daemon's.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

FAULT_VARIABLE = "VLM_RL_FAULT"
_SIZE = 512


@dataclass(frozen=True)
class Announced:
    """A process's last announcement; `since` is of the host's monotonic clock, which all its processes share."""

    phase: str
    since: float
    entered: float
    count: int
    pid: int

    def silent_secs(self) -> float:
        return time.monotonic() - self.since

    def in_phase_secs(self) -> float:
        return time.monotonic() - self.entered


@dataclass
class _Process:
    name: str = ""
    file: int = -1
    phase: str = "starting"
    entered: float = 0.0
    count: int = 0
    reached: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_THIS = _Process()


def open_phases(directory: Path | None, name: str) -> None:
    """From now on this process, called `name`, announces its phases in `directory`; without one it only breaks."""
    _THIS.name = name
    if directory is None:
        return
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    _THIS.file = os.open(directory / f"{name}.phase", os.O_WRONLY | os.O_CREAT, 0o600)
    announce("starting")


def announce(phase: str) -> None:
    """The process is now in this phase (the same one again counts as progress in it)."""
    if phase != _THIS.phase or not _THIS.count:
        _THIS.phase, _THIS.entered = phase, time.monotonic()
    _THIS.count += 1
    beat()
    reach(phase)


def beat() -> None:
    """The present phase goes on, and is not stuck."""
    if _THIS.file < 0:
        return
    said = {
        "phase": _THIS.phase[:200],
        "since": time.monotonic(),
        "entered": _THIS.entered,
        "count": _THIS.count,
        "pid": os.getpid(),
    }
    os.pwrite(_THIS.file, json.dumps(said).encode().ljust(_SIZE), 0)


def read_announced(directory: Path, name: str) -> Announced | None:
    """None where nothing is said yet, or just now being written."""
    try:
        return Announced(**json.loads((directory / f"{name}.phase").read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def is_stopped(pid: int) -> bool:
    """By SIGSTOP, or by a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def reach(point: str) -> None:
    """A point within a phase; only a fault that a test asked for makes anything of it."""
    asked = os.environ.get(FAULT_VARIABLE)
    if not asked:
        return
    process, phase, number, action, file = asked.split(":", 4)
    if process != _THIS.name or phase != point:
        return
    with _THIS.lock:
        _THIS.reached[point] = _THIS.reached.get(point, 0) + 1
        if _THIS.reached[point] != int(number):
            return
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return
    os.write(2, f"fault: {action} at {point} ({number})\n".encode())
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        cut_off()


def cut_off() -> None:
    """Every TCP socket of this process, listening ones too, is shut down: nobody hears it, and it hears nobody."""
    for entry in os.listdir("/proc/self/fd"):  # noqa: PTH208 -- numbers, not paths
        try:
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):  # noqa: PTH115
                with socket.socket(fileno=os.dup(int(entry))) as found:
                    if found.family in (socket.AF_INET, socket.AF_INET6):
                        found.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue
