"""Which of this machine's clusters one may be: ports, names and addresses of a slot are its holder's alone.

A slot is held by an open, locked file that says where the holder keeps its cluster: whoever takes the slot next ends
what a killed holder left there.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path
from typing import TextIO

SLOTS = 8


def take(kind: str) -> tuple[int, TextIO] | None:
    """The first slot that nobody holds, and the file that holds it until it is closed."""
    for slot in range(SLOTS):
        file = lock(kind, slot)
        if file is not None:
            return slot, file
    return None


def lock(kind: str, slot: int) -> TextIO | None:
    file = Path(f"/run/lock/vlm-rl-{kind}-{slot}").open("a+")  # noqa: SIM115 -- held by whoever gets it
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file


def last_root(file: TextIO) -> Path | None:
    """Where the last holder had its cluster."""
    file.seek(0)
    text = file.read().strip()
    return Path(text) if text else None


def note_root(file: TextIO, root: Path | None) -> None:
    file.seek(0)
    file.truncate()
    file.write(f"{root or ''}\n")
    file.flush()


def keep_held(file: TextIO) -> int:
    """The pid of a process that holds the slot from now on, after this one has ended."""
    os.set_inheritable(file.fileno(), True)
    words = ["sleep", "infinity"]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(words, pass_fds=[file.fileno()], start_new_session=True, **streams).pid
