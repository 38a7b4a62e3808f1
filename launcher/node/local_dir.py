"""The node-local directory of a run: in memory where there is /dev/shm, one below it for each node daemon.

A daemon holds its own by a locked file that names the machine. Where a cluster killed daemon and guards alike nobody
was left to empty it: the next daemon of this user there, of whatever run, takes away what nobody holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import stat
import tempfile
import time
from pathlib import Path

from launcher.node import agreed
from launcher.run_dir import RunDir

MEMORY = Path("/dev/shm")
HELD = ".held"
RUNS = "*-" + 8 * "[0-9a-f]"
"""Directories of runs, as local_root names them: `paths.local` may hold much else."""
FREE_SECS = 15.0


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
    before = _free(path)
    try:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True, mode=0o700)
        if path.stat().st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user")
        made = path / f"{HELD}.new"
        held = os.open(made, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # where files cannot be locked nobody sweeps either
            fcntl.flock(held, fcntl.LOCK_EX)
        os.write(held, platform.node().encode())
        made.rename(path / HELD)  # never seen unlocked by one that sweeps
        return held
    finally:
        if before >= 0:
            os.close(before)


def _free(path: Path) -> int:
    """Waits until nobody holds or sweeps it; then we hold what is there, or -1 where nothing is."""
    deadline = time.monotonic() + FREE_SECS
    try:
        handle = os.open(path / HELD, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(handle)
                raise OSError(f"{path} is held by another node daemon of this run on this machine; end it") from None
            time.sleep(0.05)
        except OSError:
            return handle
        else:
            return handle


def sweep(base: Path) -> None:
    """Directories of this user's killed daemons on this machine: their lock is free."""
    with contextlib.suppress(OSError):
        for lock in base.glob(f"{RUNS}/*/{HELD}"):
            with contextlib.suppress(OSError):  # held, or gone meanwhile
                _take_away(lock)


def _take_away(lock: Path) -> None:
    # in a directory that others may write, a folder of theirs could turn into a link while we remove it
    if any(not _ours(each) for each in (lock.parent.parent, lock.parent)):
        return
    handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # not another machine's, where storage is shared and locks may mean nothing; not a daemon's that came meanwhile
        same = os.path.samestat(os.fstat(handle), lock.lstat())
        if same and os.read(handle, 1024) == platform.node().encode():
            remove(lock.parent)
    finally:
        os.close(handle)


def _ours(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def remove(path: Path) -> None:
    """This daemon's part, and the run's directory once it is empty."""
    shutil.rmtree(path, ignore_errors=True)
    agreed.sweep(agreed.agreed(path))
    with contextlib.suppress(OSError):
        path.parent.rmdir()
