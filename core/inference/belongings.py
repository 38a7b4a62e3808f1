"""What a server leaves outside its process: a private directory for its sockets, and segments of shared memory.

Owns their removal, however the server ends: the directory is TMPDIR of the server and goes with it, or, where nobody
was left to remove it, when the next server starts; a segment loses its name as soon as everyone has it open.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

PREFIX = "vlm-rl-server-"  # short: a socket's path has room for some hundred characters
_LOCK = "lock"
_MEMORY = "/dev/shm/"
_LEFT_FOR_EVER = "sglang_loads_"  # SGLang never removes these; only its own /get_load opens them later
_NAMES = (_LEFT_FOR_EVER, "sgl_shm_", "psm_", "sem.mp-")  # the rest is left when nobody had time to tidy up


class ServerDirectory:
    """Below the machine's TMPDIR; locked as long as this process lives."""

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = self.path / ".lock"
        self._handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        lock.rename(self.path / _LOCK)  # never seen unlocked by one that sweeps

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._handle)


def _sweep(root: Path) -> None:
    """Directories of this user whose holder was killed: their lock is free."""
    for directory in root.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or gone meanwhile
            handle = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(handle)


def segments(root: int) -> set[str]:
    """Of shared memory, that `root` and its descendants map. Those that no one opens by name again lose it now."""
    found = set(_mapped(_tree(root)))
    unlink(name for name in found if name.startswith(_MEMORY + _LEFT_FOR_EVER))
    return found


def unlink(names: Iterable[str]) -> None:
    """What is open stays so."""
    for name in names:
        with suppress(OSError):
            Path(name).unlink()


def _tree(root: int) -> Iterable[int]:
    with suppress(psutil.Error):
        process = psutil.Process(root)
        yield from (each.pid for each in (process, *process.children(recursive=True)))


def _mapped(pids: Iterable[int]) -> Iterable[str]:
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                name = line.partition(_MEMORY)[2]
                if name.startswith(_NAMES) and not name.endswith("(deleted)"):
                    yield _MEMORY + name
