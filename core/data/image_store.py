"""PNGs by content hash on this node, bounded in bytes, with the run directory's copies behind them.

Owns the files of its directory. A picture that was evicted is made again from its row by core.data.service.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections import OrderedDict
from pathlib import Path

DISK_BYTES = 2 << 30
MEMORY_BYTES = 64 << 20
_HASH = re.compile(r"[0-9a-f]{32}")


class ImageStore:
    """Pictures in `directory`; `behind` is looked at for what is not there. Safe to use from several threads."""

    def __init__(
        self, directory: Path, behind: Path | None, *, disk_bytes: int = DISK_BYTES, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.directory = directory
        self.behind = behind
        self.disk_bytes = disk_bytes
        self.memory_bytes = memory_bytes
        self.write_errors = 0
        self._lock = threading.Lock()
        self._recent: OrderedDict[str, bytes] = OrderedDict()
        self._recent_bytes = 0
        # What a service that died left behind is still good.
        self._sizes: OrderedDict[str, int] = OrderedDict(
            (file.stem, file.stat().st_size)
            for file in sorted(directory.glob("*.png"), key=lambda f: f.stat().st_mtime)
        )
        self._disk_used = sum(self._sizes.values())

    def put(self, name: str, png: bytes) -> None:
        """Keeps a picture. A disk that is full costs the copy, not the picture: it stays in memory for a while."""
        with self._lock:
            self._remember(name, png)
            if name in self._sizes:
                self._sizes.move_to_end(name)
                return
            scratch = self.directory / f".{name}.{os.getpid()}"
            try:
                scratch.write_bytes(png)
                scratch.rename(self.directory / f"{name}.png")
            except OSError:
                self.write_errors += 1
                with contextlib.suppress(OSError):
                    scratch.unlink(missing_ok=True)
                return
            self._sizes[name] = len(png)
            self._disk_used += len(png)
            while self._disk_used > self.disk_bytes and len(self._sizes) > 1:
                oldest, size = self._sizes.popitem(last=False)
                (self.directory / f"{oldest}.png").unlink(missing_ok=True)
                self._disk_used -= size

    def get(self, name: str) -> bytes | None:
        """The PNG of a hash, or None where it lies nowhere. Anything but a hash is None too."""
        if not _HASH.fullmatch(name):
            return None
        with self._lock:
            if name in self._recent:
                self._recent.move_to_end(name)
                return self._recent[name]
        for directory in (self.directory, self.behind):
            if directory is None:
                continue
            with contextlib.suppress(OSError):
                png = (directory / f"{name}.png").read_bytes()
                with self._lock:
                    self._remember(name, png)
                return png
        return None

    def _remember(self, name: str, png: bytes) -> None:
        self._recent_bytes += len(png) - len(self._recent.get(name, b""))
        self._recent[name] = png
        self._recent.move_to_end(name)
        while self._recent_bytes > self.memory_bytes and len(self._recent) > 1:
            self._recent_bytes -= len(self._recent.popitem(last=False)[1])
