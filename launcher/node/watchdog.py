"""Does anything still move? The services' /status counters, compared over time, and a report of who waits on whom.

Owns the comparison only; the lead daemon asks the services, writes the report and ends the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from launcher.waiting import chain

CLOCKS = ("uptime", "time", "now", "updated", "age", "secs", "rss", "eta", "beat", "_s", "_mb", "pid")
"""Keys that change although nothing moves."""


class Watchdog:
    def __init__(self, limit_secs: float, now: float) -> None:
        self.limit_secs = limit_secs
        self._moved = now
        self._last = ""

    def stuck_for(self, statuses: Mapping[str, Any], now: float) -> float | None:
        """Seconds without movement once they are too many, else None."""
        seen = json.dumps({name: progress(status) for name, status in statuses.items()}, sort_keys=True, default=str)
        if seen != self._last:
            self._last, self._moved = seen, now
        still = now - self._moved
        return still if still >= self.limit_secs else None


def progress(status: Any) -> Any:
    """What of a /status can only change by progress: its `progress` entry, else everything but clocks."""
    if not isinstance(status, Mapping):
        return status
    if isinstance(status.get("progress"), Mapping):
        return dict(status["progress"])
    return {
        key: progress(value)
        for key, value in status.items()
        if not any(key == clock or key.endswith(clock) for clock in CLOCKS)
    }


def report(statuses: Mapping[str, Any], children: Mapping[str, str], still: float) -> str:
    """Who waits on whom, as far as each of them says."""
    waits = " ".join(chain(statuses, {})[:3])
    lines = [f"nothing moved for {still:.0f} s (watchdog_secs): {waits}; what each process says:"]
    for name, status in statuses.items():
        lines.append(f"  {name}: {json.dumps(status, default=str)}")
    lines += [f"  {name}: {state}" for name, state in children.items() if name not in statuses]
    lines.append("  the stacks of every process are at the end of their logs")
    return "\n".join(lines)
