"""The groups that were admitted, in admission order, until a batch takes them.

Owns the order and each group's place in it. What a group is to be filled with is the collector's business, when a new
one may be added is admission's. A void group leaves; the next ones move up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from core.rl.trajectory import Group
from core.rollout.admission import Counts


@dataclass(eq=False)
class Entry:
    """One admitted prompt; `cursor_after` is where the data goes on behind it, `pngs` are its images by hash."""

    group_id: str
    cursor_after: dict | None
    started_version: int
    group: Group | None = None
    pngs: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Buffer:
    """First in, first out: a batch is the first `batch_size` groups, and waits for the slowest of them."""

    batch_size: int
    consumed: int = 0
    _entries: deque[Entry] = field(default_factory=deque)
    _ready: int = 0

    def counts(self) -> Counts:
        return Counts(self.consumed, self._ready, len(self._entries) - self._ready)

    def add(self, entry: Entry) -> None:
        self._entries.append(entry)

    def finish(self, entry: Entry, group: Group) -> None:
        entry.group = group
        self._ready += 1

    def void(self, entry: Entry) -> None:
        self._entries.remove(entry)
        if entry.group is not None:
            self._ready -= 1

    def head_is_ready(self, size: int | None = None) -> bool:
        size = self.batch_size if size is None else size
        if not 0 < size <= self._ready:
            return False
        return all(entry.group is not None for entry, _ in zip(self._entries, range(size), strict=False))

    def take(self, size: int | None = None) -> list[Entry]:
        """The next batch. Counts a full batch as consumed even where the data's end left a shorter one."""
        size = self.batch_size if size is None else size
        if not self.head_is_ready(size):
            raise ValueError(f"the first {size} groups are not all finished")
        taken = [self._entries.popleft() for _ in range(size)]
        self._ready -= size
        self.consumed += self.batch_size
        return taken

    def __len__(self) -> int:
        return len(self._entries)
