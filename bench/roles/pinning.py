"""Pins a process, and every thread it starts later, to one core."""

from __future__ import annotations

import os

SERVER_CORE, TRAINER_CORE = 0, 1


def pin(core: int) -> None:
    """To the core with this number among those the process may use; the last one where there are fewer."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[min(core, len(cores) - 1)]})
