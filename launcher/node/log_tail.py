"""The end of a process's log, and the error in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TRACEBACK = "Traceback (most recent call last):"
TAIL_BYTES = 64 << 10
GUARD_LINE = re.compile(r"^\d\d:\d\d:\d\d guard of ")
FOLLOW_UP = re.compile(
    r"connection (reset|closed|refused)|broken pipe|gloo|nccl|socket|store|timed? ?out|cannot be reached", re.IGNORECASE
)


@dataclass(frozen=True)
class LastError:
    message: str
    traceback: str

    @property
    def may_follow_another(self) -> bool:
        """True for errors that a rank shows when another rank died first."""
        return bool(FOLLOW_UP.search(self.message)) or not self.message


def tail(path: Path, *, offset: int = 0, lines: int = 20) -> list[str]:
    """The last lines written after `offset`."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(offset, file.tell() - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return text.splitlines()[-lines:]


def last_error(path: Path, *, offset: int = 0) -> LastError:
    """The last traceback after `offset` and its last line; without one, the last line and the lines before it."""
    found = [line for line in tail(path, offset=offset, lines=2000) if not GUARD_LINE.match(line)]
    starts = [number for number, line in enumerate(found) if line.strip() == TRACEBACK]
    if not starts:
        kept = [line for line in found if line.strip()][-20:]
        return LastError(kept[-1].strip() if kept else "", "\n".join(kept))
    block = found[starts[-1] :]
    end = next((n for n, line in enumerate(block[1:], 1) if line and not line.startswith(" ")), len(block) - 1)
    message = block[end].strip()
    more = end + 1
    while more < len(block) and block[more].strip() and more - end < 10:  # a message of several lines
        more += 1
    return LastError(message, "\n".join(block[:more]))
