"""The node-local directory of a run: in memory where there is /dev/shm, one below it for each node daemon.

A daemon holds its own by a locked file. Where a cluster killed daemon and guards alike nobody was left to empty it: the
next daemon of this user on the machine, of whatever run, takes away what nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from launcher.node import agreed
from launcher.run_dir import RunDir

MEMORY = Path("/dev/shm")
HELD = ".held"


def local_root(configured: str | None, run_id: str, run_dir: RunDir) -> Path:
    """`paths.local`, or a directory named after the run and its place, so that equal names never meet."""
    unique = f"{run_id}-{hashlib.sha256(str(run_dir.root.resolve()).encode()).hexdigest()[:8]}"
    if configured:
        return Path(configured).expanduser().absolute() / unique
    base = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"vlm-rl-{os.getuid()}" / unique


def make(path: Path) -> int:
    """Empty and private; what an attempt that was killed left there goes. The descriptor that holds it."""
    sweep(path.parent.parent)
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True, mode=0o700)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    made = path / f"{HELD}.new"
    held = os.open(made, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    made.rename(path / HELD)  # never seen unlocked by one that sweeps
    return held


def sweep(base: Path) -> None:
    """Directories of killed daemons: their lock is free."""
    for lock in base.glob(f"*/*/{HELD}"):
        with contextlib.suppress(OSError):  # another user's, held, or gone meanwhile
            handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(lock.parent)
            finally:
                os.close(handle)


def remove(path: Path) -> None:
    """This daemon's part, and the run's directory once it is empty."""
    shutil.rmtree(path, ignore_errors=True)
    agreed.sweep(agreed.agreed(path))
    with contextlib.suppress(OSError):
        path.parent.rmdir()
