"""The run's registry: one TCPStore on a socket that the lead daemon bound itself, and a thread that talks to it.

Owns the store client (one per daemon, used by this thread only; no call that can block on a missing key) and judges
heartbeats: they are counters, and their age is counted on this reader's clock since the counter last moved. What the
values mean is launcher.node.book's business. Needs torch, which takes seconds to import: the daemon imports this module
from a thread while its first children start.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore

PERIOD = 0.25
CONNECT_SECS = 60
ANSWER_SECS = 30
READY = "ready"
STEPS = 4
"""Store reads per period while something is being written."""


@dataclass(frozen=True)
class Snapshot:
    """Every key as last read, and the seconds since each node's heartbeat last moved."""

    values: dict[str, str]
    beat_ages: dict[str, float]


@dataclass(frozen=True)
class _Write:
    key: str
    value: str
    expected: str | None
    last: bool = False


class Registry(threading.Thread):
    """Writes what is put, beats for `me`, and hands every snapshot to `on_snapshot` (called in this thread)."""

    def __init__(
        self,
        address: tuple[str, int],
        listener: socket.socket | None,
        me: str,
        *,
        keys: Sequence[str],
        nodes: Sequence[str],
        on_snapshot: Callable[[Snapshot], None],
        on_lost: Callable[[str], None],
    ) -> None:
        super().__init__(name="registry", daemon=True)
        self._address = address
        self._listener = listener
        self._me = me
        self._keys = list(keys)
        self._nodes = list(nodes)
        self._on_snapshot = on_snapshot
        self._on_lost = on_lost
        self._writes: queue.Queue[_Write] = queue.Queue()
        self._closing = threading.Event()
        self._beats: dict[str, tuple[int, float]] = {}

    def put(self, key: str, value: str) -> None:
        self._writes.put(_Write(key, value, None))

    def compare_set(self, key: str, expected: str, value: str) -> None:
        """Sets `key` only if it still is `expected`; the next snapshot shows who won."""
        self._writes.put(_Write(key, value, expected))

    def close(self, key: str = "", value: str = "") -> None:
        """Writes what is left, then `key`, and ends the thread: whoever reads that last entry may go, too."""
        self._closing.set()
        self._writes.put(_Write(key, value, None, last=True))

    def run(self) -> None:
        try:
            store = self._connect()
            if self._await_ready(store):
                self._serve(store)
        except Exception as error:  # torch raises several kinds when the store's process is gone
            self._on_lost(str(error).splitlines()[0] if str(error) else type(error).__name__)

    def _connect(self) -> TCPStore:
        host, port = self._address
        if self._listener is None:
            socket.create_connection((host, port), ANSWER_SECS).close()  # torch would try a refused port for minutes
            wait = timedelta(seconds=CONNECT_SECS)
            store = TCPStore(host, port, None, False, timeout=wait, wait_for_workers=False)
        else:
            store = TCPStore(
                host,
                port,
                None,
                True,
                timeout=timedelta(seconds=ANSWER_SECS),
                wait_for_workers=False,
                master_listen_fd=self._listener.detach(),
            )
            for key in self._keys:
                store.compare_set(key, "", "")
            for node in self._nodes:
                store.add(f"beat/{node}", 0)
            store.set(READY, "1")
        store.set_timeout(timedelta(seconds=ANSWER_SECS))
        return store

    def _await_ready(self, store: TCPStore) -> bool:
        """False when closed meanwhile. `check` never blocks, `get` of a missing key would."""
        while not store.check([READY]):
            if self._closing.wait(PERIOD):
                return False
        return True

    def _serve(self, store: TCPStore) -> None:
        names = [*self._keys, *(f"beat/{node}" for node in self._nodes)]
        next_beat = 0.0
        while True:
            closed = False
            for write in self._drain(PERIOD):
                closed = closed or write.last
                if not write.key:
                    continue
                if write.expected is None:
                    store.set(write.key, write.value)
                else:
                    store.compare_set(write.key, write.expected, write.value)
            if closed:
                return
            if time.monotonic() >= next_beat:
                store.add(f"beat/{self._me}", 1)
                next_beat = time.monotonic() + PERIOD * STEPS
            found = dict(zip(names, (value.decode() for value in store.multi_get(names)), strict=True))
            self._on_snapshot(self._judged(found))

    def _judged(self, found: dict[str, str]) -> Snapshot:
        now = time.monotonic()
        for node in self._nodes:
            count = int(found.pop(f"beat/{node}"))
            if node not in self._beats or self._beats[node][0] != count:
                self._beats[node] = (count, now)
        return Snapshot(found, {node: now - seen for node, (_, seen) in self._beats.items()})

    def _drain(self, patience: float) -> list[_Write]:
        """What there is to write; waits up to `patience` for the first."""
        writes: list[_Write] = []
        try:
            writes.append(self._writes.get(timeout=patience))
            while True:
                writes.append(self._writes.get_nowait())
        except queue.Empty:
            return writes
