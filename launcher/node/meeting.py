"""How the parts of one server over several nodes find each other, and start again together.

Part 0, the head, announces each of its starts: an id, its interface, the port where the parts meet. The others start
with it and follow: another start, or none, ends their process. A part whose process ends says so, and the head then
ends itself. Values to values; who carries them is the registry, who acts on them are the roles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


@dataclass(frozen=True)
class Meeting:
    """One start of the head. `start` is never used twice."""

    start: str
    host: str
    port: int

    @staticmethod
    def of(found: Mapping[str, Any] | None) -> Meeting | None:
        return Meeting(found["start"], found["host"], found["port"]) if found else None


@dataclass(frozen=True)
class PartReport:
    """How a part that is no head stands. `start`: the last one that it took part in."""

    name: str
    server: str
    part: int
    start: str
    state: str  # up (its process runs) | down (it ended, or waits) | out (given up)
    why: str = ""


class Act(StrEnum):
    WAIT = "wait"
    START = "start"
    END = "end"


def next_act(meeting: Meeting | None, joined: str, running: bool) -> Act:
    """What a part does. `joined`: the last start that it took part in, by this process of ours or one before it: what
    ended there is joined again by nobody, the head has to start anew."""
    if running:
        return Act.WAIT if meeting is not None and meeting.start == joined else Act.END
    return Act.START if meeting is not None and meeting.start != joined else Act.WAIT


def broken(start: str, parts: Iterable[PartReport]) -> PartReport | None:
    """The part because of which the head's start cannot go on."""
    given_up = next((each for each in parts if each.state == "out"), None)
    return given_up or next((each for each in parts if each.start == start and each.state != "up"), None)
