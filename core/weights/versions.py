"""The published versions in a weights directory: which are there, and how one goes. Torch-free."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from core.weights.errors import WeightsError
from core.weights.manifest import NAME

STAGING = ".tmp-"


def remove_version(weights_dir: Path, name: str) -> None:
    """Deletes a version that nobody reads any more: out of sight first, so that no reader finds half of it."""
    if not name or Path(name).name != name or name.startswith("."):
        raise WeightsError(f"{name!r} is not the name of a version")
    grave = weights_dir / f"{STAGING}gone-{name}"
    try:
        os.rename(weights_dir / name, grave)  # noqa: PTH104
    except FileNotFoundError:
        return
    shutil.rmtree(grave, ignore_errors=True)


def versions(weights_dir: Path) -> list[str]:
    """Names of the versions that are there, oldest first."""
    found = [path.parent for path in weights_dir.glob(f"v*/{NAME}")]
    return [path.name for path in sorted(found, key=lambda path: (path.stat().st_mtime_ns, path.name))]
