"""This node's parts of servers over several nodes: what the registry is told of them.

Owns the entries meeting/ (of a head) and part/ (of the others); launcher.node.meeting says what follows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from launcher.node import book as entries
from launcher.node.children import ChildState
from launcher.node.meeting import Meeting, PartReport
from launcher.node.state import RunError
from launcher.planning.layout import Server


class Parts:
    def __init__(self, servers: Iterable[Server], put: Callable[[str, str], None]) -> None:
        self._put = put
        self._servers = {each.process: each for each in servers if each.parts > 1}
        self._reports = {
            name: PartReport(name, each.name, each.part, "", "down")
            for name, each in self._servers.items()
            if each.part
        }

    def __bool__(self) -> bool:
        return bool(self._servers)

    def announce(self, name: str, meeting: Meeting) -> bool:
        """A head starts. False: there is no such one here."""
        server = self._servers.get(name)
        if server is None or server.part:
            return False
        self._put(*entries.meeting(server.name, meeting))
        return True

    def report(self, name: str, *, state: str, why: str = "", start: str | None = None) -> bool:
        """How a part stands; `start` None: the one that it had. False: there is no such one here."""
        known = self._reports.get(name)
        if known is None:
            return False
        start = known.start if start is None else start
        self._reports[name] = replace(known, state=state, why=why, start=start)
        self._put(*entries.part(self._reports[name]))
        return True

    def changed(self, name: str, state: ChildState, error: RunError | None) -> bool:
        """Its process registered, died or was given up. True: it is no server for the run to ask."""
        server = self._servers.get(name)
        if server is None:
            return False
        if server.part == 0:
            if state not in (ChildState.STARTING, ChildState.UP):
                self._put(*entries.meeting(server.name, None))  # the others end theirs and wait
            return False
        if state is not ChildState.UP:
            said = error.message if error else "its process ended"
            self.report(name, state="out" if state is ChildState.OUT else "down", why=said)
        return True
