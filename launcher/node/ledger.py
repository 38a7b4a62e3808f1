"""This daemon's side of the registry: what it wrote, what it last read, and the thread in between.

Owns the entries that only this daemon writes: they are seen here at once, and by the others as soon as the registry
(which needs torch, seconds of import) is up. What follows from them is the daemon's business.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
from collections.abc import Callable
from typing import Any

from launcher.node.book import Book, keys, node_names
from launcher.planning.layout import Plan

CLOSING_SECS = 5.0
LISTEN_SECS = 0.5


class Ledger:
    def __init__(self, plan: Plan, me: str, on_read: Callable[[], None], on_lost: Callable[[str], None]) -> None:
        self.book = Book()
        self._plan = plan
        self._me = me
        self._on_read = on_read
        self._on_lost = on_lost
        self._own: dict[str, str] = {}
        self._unwritten: list[tuple[str, str, str | None]] = []
        self._registry: Any = None
        self._silent_secs = 0.0
        self._heard = False

    @property
    def connected(self) -> bool:
        return self._registry is not None and self._registry.is_alive()

    def put(self, key: str, value: str) -> None:
        """An entry of this daemon's own."""
        self._own[key] = value
        self.book = Book({**self.book.values, **self._own}, self.book.beat_ages)
        self.write(key, value)
        asyncio.get_running_loop().call_soon(self._on_read)

    def write(self, key: str, value: str, *, expected: str | None = None) -> None:
        """A shared entry; with `expected`, only if it still has that value."""
        if self._registry is None:
            self._unwritten.append((key, value, expected))
        else:
            self._send(self._registry, key, value, expected)

    async def open(self, store: str, listener: socket.socket | None) -> None:
        """Connects to the store; hosts it on `listener` when given."""
        # torch takes seconds to import; the children start meanwhile
        module = await asyncio.to_thread(importlib.import_module, "launcher.node.registry")
        loop = asyncio.get_running_loop()
        host, _, port = store.rpartition(":")
        registry = module.Registry(
            (host, int(port)),
            listener,
            self._me,
            keys=keys(self._plan),
            nodes=node_names(self._plan),
            on_snapshot=lambda snapshot: loop.call_soon_threadsafe(self._read, snapshot),
            on_lost=lambda why: loop.call_soon_threadsafe(self._on_lost, why),
        )
        for key, value, expected in self._unwritten:
            self._send(registry, key, value, expected)
        self._registry = registry
        registry.start()

    async def keep_listening(self, limit: float, first: float) -> None:
        """Until cancelled: a store whose process is stopped or cut off blocks its reader, and is lost all the same.

        `first` holds until it is heard at all: its host imports torch, which from a cold file system takes minutes.
        Counted in looks, not by the clock: a daemon that was itself stopped has heard nothing meanwhile.
        """
        while True:
            await asyncio.sleep(LISTEN_SECS)
            self._silent_secs += LISTEN_SECS if self.connected else 0.0
            if self._silent_secs > (limit if self._heard else first):
                self._on_lost(f"nothing heard of it for {self._silent_secs:g} s")
                return

    async def close(self, *last: str) -> None:
        """Writes what is left, then the last key and value, if given."""
        if self.connected:
            self._registry.close(*last)
            await asyncio.to_thread(self._registry.join, CLOSING_SECS)

    def _read(self, snapshot: Any) -> None:
        self._heard = True
        self._silent_secs = 0.0
        self.book = Book({**snapshot.values, **self._own}, snapshot.beat_ages)
        self._on_read()

    @staticmethod
    def _send(registry: Any, key: str, value: str, expected: str | None) -> None:
        if expected is None:
            registry.put(key, value)
        else:
            registry.compare_set(key, expected, value)
