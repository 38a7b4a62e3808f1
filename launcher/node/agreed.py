"""Links to versions at one place on every node: a server over several nodes is given one path, and each part reads it.

Owns `<local directory of the run>/served/<version>`. A link leads to a verified copy of this machine; daemons that
share a machine share the links, so that one of them may let go of its copy while another's stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from core.weights.manifest import NAME as MANIFEST

NAME = "served"


def agreed(local: Path) -> Path:
    """Beside a daemon's directory."""
    return local.parent / NAME


def lead_to(links: Path, copy: Path) -> Path:
    """The link of that version, leading to `copy`."""
    links.mkdir(mode=0o700, exist_ok=True)
    with _alone(links):
        _point(links / copy.name, copy)
    return links / copy.name


def let_go(links: Path, copy: Path) -> None:
    """Removes the copy; its link leads to another's copy from then on, or goes."""
    link = links / copy.name
    with _alone(links):
        if link.is_symlink() and link.readlink() == copy:
            _elsewhere(link, copy)
    shutil.rmtree(copy, ignore_errors=True)
    with _alone(links):
        if link.is_symlink() and not link.exists():  # it led to one that went meanwhile
            _elsewhere(link, copy)


def sweep(links: Path) -> None:
    """Links that lead nowhere go, and with the last one their directory."""
    with contextlib.suppress(OSError), _alone(links):
        for link in links.iterdir():
            if link.is_symlink() and not link.exists():
                link.unlink()
    with contextlib.suppress(OSError):
        links.rmdir()


def _elsewhere(link: Path, gone: Path) -> None:
    others = [each.parent for each in link.parent.parent.glob(f"*/{link.name}/{MANIFEST}")]
    copies = [each for each in others if each not in (link, gone)]
    if copies:
        _point(link, copies[0])
    else:
        link.unlink(missing_ok=True)


def _point(link: Path, copy: Path) -> None:
    """Whoever looks finds the old link or the new one."""
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(copy)
    fresh.replace(link)


@contextlib.contextmanager
def _alone(links: Path) -> Iterator[None]:
    if not links.exists():
        yield
        return
    handle = os.open(links, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
