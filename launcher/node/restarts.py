"""When a child that died is started again, and when it is given up as flapping. Values in, values out."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_PAUSE = 0.25
LONGEST_PAUSE = 30.0
SETTLED_SECS = 60.0
"""A child that lived this long has forgotten its earlier deaths."""
UNSETTLED_DEATHS = 3


@dataclass
class Restarts:
    """Deaths of one child, counted since it last lived for SETTLED_SECS."""

    limit: int = UNSETTLED_DEATHS
    settled_secs: float = SETTLED_SECS
    deaths: int = field(default=0, init=False)
    total: int = field(default=0, init=False)

    def pause_after(self, lived_secs: float) -> float | None:
        """Seconds until the next start, or None: it flaps and is left out."""
        self.deaths = 1 if lived_secs >= self.settled_secs else self.deaths + 1
        self.total += 1
        if self.deaths >= self.limit:
            return None
        return min(LONGEST_PAUSE, FIRST_PAUSE * 4 ** (self.deaths - 1))
