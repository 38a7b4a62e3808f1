"""How long servers had work, and how long they idled because only the trainer could make room.

Owns two clocks and what of them each batch has taken; whether there is room is admission's arithmetic.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from core.rollout.pool import ServerPool
from core.rollout.statistics import Tally

_SAMPLING_SECS = 0.05


class Waiting:
    """`room(served)`: groups that the staleness bound allows just now; None while nothing can be admitted at all."""

    def __init__(self, pool: ServerPool, room: Callable[[int], int | None]) -> None:
        self._pool = pool
        self._room = room
        self._sampled = 0  # tokens of finished answers
        self._blocked_at_last = 0.0
        self._busy_at_last = 0.0
        self.blocked_secs = 0.0

    async def measure(self) -> None:
        """Until cancelled."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(_SAMPLING_SECS)
            now = time.monotonic()
            if self._for_trainer():
                self.blocked_secs += now - last
            last = now

    def _for_trainer(self) -> bool:
        served = self._pool.served()
        return served is not None and self._pool.idle() and self._room(served) == 0

    def since_last(self, tally: Tally) -> dict[str, Any]:
        """Since the last batch; but the rate is that of all servers since the start, while they had work.

        Batches that were held back by the staleness bound are formed in one instant: a rate between two means nothing.
        """
        busy = self._pool.busy_secs()
        self._sampled += tally.tokens
        stats = {
            "rollout_tokens_per_s": self._sampled * max(1, len(self._pool.in_rotation())) / max(busy, 1e-9),
            "wait_trainer_secs": self.blocked_secs - self._blocked_at_last,
            "server_busy_secs": busy - self._busy_at_last,
            "void": tally.void,
            "reward_errors": tally.reward_errors,
        }
        self._busy_at_last, self._blocked_at_last = busy, self.blocked_secs
        return stats
