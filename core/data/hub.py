"""Where a model or dataset lies on this machine: a local path, or a hub id resolved in a cache.

Owns the look-up only; `prepare` fills the cache on a login node, and nothing here touches the network.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal

Kind = Literal["model", "dataset"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class HubError(Exception):
    """A model or dataset that is not on this machine; the message says where it was looked for."""


def resolve(path_or_id: str, *, cache: str | Path | None, kind: Kind) -> Path:
    """Local path of a directory, a file, or a hub id whose snapshot lies in `cache` or in the hub's own cache.

    Raises HubError.
    """
    try:
        local = Path(path_or_id).expanduser()
    except RuntimeError:
        raise HubError(f"{kind} {path_or_id!r}: this machine knows no such user") from None
    if local.exists():
        return local
    looked = [str(local.absolute())]
    if _HUB_ID.fullmatch(path_or_id):
        folder = f"{kind}s--" + path_or_id.replace("/", "--")
        for root in _cache_roots(cache):
            if (snapshot := _snapshot(root / folder)) is not None:
                return snapshot
            looked.append(str(root / folder))
    raise HubError(
        f"{kind} {path_or_id!r} is not on this machine (looked at {', '.join(looked)}); "
        f"give a local path, or bring it with `python -m launcher prepare CONFIG` on a machine with internet"
    )


def _cache_roots(cache: str | Path | None) -> list[Path]:
    roots = []
    if cache is not None:
        own = Path(cache).expanduser()
        roots += [own, own / "hub"]
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    roots.append(Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser())
    return list(dict.fromkeys(roots))


def _snapshot(repository: Path) -> Path | None:
    """The revision that refs/main names, else the newest snapshot."""
    snapshots = repository / "snapshots"
    try:
        named = snapshots / (repository / "refs" / "main").read_text().strip()
        if named.is_dir():
            return named
    except OSError:
        pass
    found = sorted(snapshots.glob("*/"), key=lambda path: path.stat().st_mtime) if snapshots.is_dir() else []
    return found[-1] if found else None
