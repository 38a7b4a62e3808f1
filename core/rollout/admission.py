"""Admission of prompts: how many groups may be started at the served version.

Owns the arithmetic and nothing else: it neither starts rollouts nor looks at their age; rollout.collector does the
first, rollout.buffer keeps their order. With consumption in admission order this arithmetic alone bounds staleness:
the k-th group (from 0) is trained at version k // batch_size, and is started only while
k < (offpolicyness + served + 1) * batch_size, so that k // batch_size - served <= offpolicyness.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What the configuration allows: groups at once (None: any), batches ahead, groups a batch, batches in all."""

    max_concurrent_rollouts: int | None
    max_head_offpolicyness: int
    batch_size: int
    total_batches: int | None = None


@dataclass(frozen=True)
class Counts:
    """Groups by where they are. Void groups are in none of these."""

    consumed: int = 0
    ready: int = 0
    running: int = 0

    @property
    def admitted(self) -> int:
        return self.consumed + self.ready + self.running


def capacity(limits: Limits, counts: Counts, served: int, servers_room: int | None = None) -> int:
    """How many new groups may be started now, at least 0. `servers_room`: so many more the servers take."""
    room = within_staleness(limits, counts, served)
    if limits.max_concurrent_rollouts is not None:
        room = min(room, limits.max_concurrent_rollouts - counts.running)
    if servers_room is not None:
        room = min(room, servers_room)
    return max(room, 0)


def within_staleness(limits: Limits, counts: Counts, served: int) -> int:
    """The same without the limit on what runs at once: 0 means that only the trainer can make room."""
    admissible = (limits.max_head_offpolicyness + served + 1) * limits.batch_size
    if limits.total_batches is not None:
        admissible = min(admissible, limits.total_batches * limits.batch_size)
    return max(admissible - counts.admitted, 0)


def staleness(step: int, started_version: int) -> int:
    """Of a group trained in batch `step` (from 1): the trainer's version then, less the version it was started with."""
    return step - 1 - started_version
