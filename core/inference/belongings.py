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
_SEGMENTS = "sglang_loads_"  # SGLang never removes these; only its own /get_load opens them later


class ServerDirectory:
    """Below the machine's TMPDIR; locked as long as this process lives."""

    def __init__(self) -> None:
        _sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._handle = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._handle, fcntl.LOCK_EX)

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


def unname_segments(root: int) -> list[str]:
    """Unlinks the segments that `root` and its descendants map: what they have open they keep, nobody else is asked."""
    names = sorted(set(_mapped(_tree(root))))
    for name in names:
        with suppress(OSError):
            Path(name).unlink()
    return names


def _tree(root: int) -> Iterable[int]:
    with suppress(psutil.Error):
        process = psutil.Process(root)
        yield from (each.pid for each in (process, *process.children(recursive=True)))


def _mapped(pids: Iterable[int]) -> Iterable[str]:
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                name = line.partition(_MEMORY)[2]
                if name.startswith(_SEGMENTS) and not name.endswith("(deleted)"):
                    yield _MEMORY + name
