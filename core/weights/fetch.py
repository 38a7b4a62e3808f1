"""One verified copy of a version in a node's own memory, for all of its servers.

Owns the copy and its verification, in one pass; which version is fetched and how long it is held is the pool's and the
daemon's affair.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from core.weights.errors import DiskFullError, WeightsError
from core.weights.manifest import (
    NAME,
    Manifest,
    VerifyMode,
    await_files,
    check_file,
    read_manifest,
    refuse_other_tensors,
    refuse_unlisted,
)

_THREADS = 8
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def fetch(
    source: Path,
    digest: str,
    local_root: Path,
    *,
    verify: VerifyMode = "full",
    visible_secs: float = 90.0,
    expected: Manifest | None = None,
) -> Path:
    """Copies the version at `source` to `local_root/<its name>`, verified, and returns that directory.

    A copy that is already there is returned as it is. `expected`: what the servers of this node have; other tensors are
    refused before a byte is copied. Nothing half-done is left behind.
    """
    target = local_root / source.name
    if _holds(target, digest):
        return target
    manifest = read_manifest(source, digest, visible_secs)
    if expected is not None:
        refuse_other_tensors(expected, manifest, source)
    await_files(source, manifest, visible_secs)
    refuse_unlisted(source, manifest)
    local_root.mkdir(parents=True, exist_ok=True, mode=0o700)
    staging = Path(tempfile.mkdtemp(prefix=f".{source.name}.", suffix=".tmp", dir=local_root))
    try:
        _copy_files(source, staging, manifest, verify)
        (staging / NAME).write_bytes(manifest.to_json())
        _settle(staging, target, digest)
    except OSError as error:
        if error.errno in FULL:
            free = shutil.disk_usage(local_root).free
            raise DiskFullError(
                f"{local_root}: no room for {source.name} ({manifest.weight_bytes:,} bytes, {free:,} free); "
                "point paths.local at a larger node-local directory or lower weight_sync.keep"
            ) from error
        raise WeightsError(f"{error.filename or source}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def fetched(local_root: Path, name: str, digest: str) -> Manifest | None:
    """The manifest of a version that this node holds, or None."""
    target = local_root / name
    return read_manifest(target, digest) if _holds(target, digest) else None


def release(local_root: Path, name: str) -> None:
    """Forgets a fetched version; one that is not there is forgotten already."""
    shutil.rmtree(local_root / version_name(name), ignore_errors=True)


def version_name(name: str) -> str:
    """As it is; refused where it would lead elsewhere."""
    if not name or Path(name).name != name or name.startswith("."):
        raise WeightsError(f"{name!r} is not the name of a version")
    return name


def _holds(target: Path, digest: str) -> bool:
    try:
        read_manifest(target, digest)
    except WeightsError:
        return False
    return True


def _copy_files(source: Path, staging: Path, manifest: Manifest, mode: VerifyMode) -> None:
    def copy(name: str) -> None:
        with (source / name).open("rb") as reading, (staging / name).open("wb") as writing:
            check_file(reading, source / name, manifest, mode, writing.write)

    names = sorted(manifest.files, key=lambda name: -manifest.files[name].bytes)
    if len(names) == 1:
        copy(names[0])
        return
    with ThreadPoolExecutor(min(_THREADS, len(names))) as pool:
        for done in [pool.submit(copy, name) for name in names]:
            done.result()


def _settle(staging: Path, target: Path, digest: str) -> None:
    try:
        os.rename(staging, target)  # noqa: PTH104  Path.rename is the same call, but reads as if it replaced
    except OSError:
        if not target.exists():
            raise
        if not _holds(target, digest):
            raise WeightsError(f"{target}: holds another version of this name; release it first") from None
