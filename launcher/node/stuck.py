"""Is a rank stuck in its phase? What ranks announced, against deadlines; and the stacks of those that may not answer.

Owns the judgement (values to values) and the waking of a stopped process for its stack; the rank group ends the ranks.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from core.telemetry.phases import Announced, is_stopped
from launcher.node import guard


@dataclass(frozen=True)
class Stuck:
    """The rank that said nothing for the longest, where none of its node's ranks says anything any more."""

    name: str
    message: str


def find_stuck(said: Mapping[str, Announced], deadline_of: Callable[[str], float]) -> Stuck | None:
    """One rank that is waited for holds all up, so ranks are stuck only when all are silent past their deadlines."""
    if not said or any(each.silent_secs() <= deadline_of(each.phase) for each in said.values()):
        return None
    name = max(said, key=lambda each: (is_stopped(said[each].pid), said[each].silent_secs()))
    first = said[name]
    stopped = ", its process is stopped (SIGSTOP)" if is_stopped(first.pid) else ""
    others = ", ".join(f"{each} in {said[each].phase}" for each in sorted(said) if each != name)
    message = (
        f"{name} is stuck in phase {first.phase}: nothing for {first.silent_secs():.1f} s, its deadline is "
        f"{deadline_of(first.phase):g} s{stopped}" + (f"; {others}" if others else "")
    )
    return Stuck(name, message)


def wake(pid: int) -> None:
    """A stopped process of this daemon's own tree goes on, so that it can write its stack before it is ended."""
    if is_stopped(pid) and pid in guard.descendants(os.getpid()):
        with contextlib.suppress(OSError):
            handle = os.pidfd_open(pid)
            signal.pidfd_send_signal(handle, signal.SIGCONT)
            os.close(handle)
