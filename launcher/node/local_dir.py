"""The node-local directory of a run: in memory where there is /dev/shm, one below it for each node daemon."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from launcher.node import agreed
from launcher.run_dir import RunDir

MEMORY = Path("/dev/shm")


def local_root(configured: str | None, run_id: str, run_dir: RunDir) -> Path:
    """`paths.local`, or a directory named after the run and its place, so that equal names never meet."""
    unique = f"{run_id}-{hashlib.sha256(str(run_dir.root.resolve()).encode()).hexdigest()[:8]}"
    if configured:
        return Path(configured).expanduser().absolute() / unique
    base = MEMORY if os.access(MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"vlm-rl-{os.getuid()}" / unique


def make(path: Path) -> None:
    """Empty and private; what an attempt that was killed left there goes."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True, mode=0o700)
    if path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")


def remove(path: Path) -> None:
    """This daemon's part, and the run's directory once it is empty."""
    shutil.rmtree(path, ignore_errors=True)
    agreed.sweep(agreed.agreed(path))
    with contextlib.suppress(OSError):
        path.parent.rmdir()
