"""Blocks of TCP ports for servers that cannot be told to bind port 0: held by a file lock, below the ephemeral range.

Owns the blocks and their locks. A lock lives as long as its holder and ends with it, however it ends; another user's
process is seen by trying to bind.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path

BLOCK = 16
FIRST = 10_000
LAST = 32_000  # Linux hands out 32768 and above to clients
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class NoPortsError(Exception):
    """Every block is taken."""


@dataclass
class PortBlock:
    """`first` … `first + BLOCK - 1` are this process's as long as the block is open."""

    first: int
    handle: int

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


def take_block(avoid: frozenset[int] = frozenset()) -> PortBlock:
    """A block that nobody holds and whose every port can be bound now; `avoid`: first ports that failed before."""
    directory = lock_directory()
    candidates = [first for first in range(FIRST, _end(), BLOCK) if first not in avoid]
    random.SystemRandom().shuffle(candidates)
    for first in candidates:
        handle = _lock(directory / f"{first}.lock")
        if handle is None:
            continue
        if all(_is_free(port) for port in range(first, first + BLOCK)):
            return PortBlock(first, handle)
        os.close(handle)
    raise NoPortsError(f"no {BLOCK} free ports in a row between {FIRST} and {_end()} on this machine")


def lock_directory() -> Path:
    """One for each user: a lock file that another user owns could not be opened."""
    directory = Path(tempfile.gettempdir()) / f"vlm-rl-ports-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


def _end() -> int:
    try:
        low = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        low = LAST
    return max(FIRST + BLOCK, min(LAST, low) - BLOCK)


def _lock(path: Path) -> int | None:
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle


def _is_free(port: int) -> bool:
    for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((host, port))
        except OSError:
            if family == socket.AF_INET:
                return False
    return True
