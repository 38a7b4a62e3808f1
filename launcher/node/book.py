"""What the registry's keys mean: addresses, generation, phase, and how the ranks of each node stand.

Values to values: writes are (key, value) pairs for launcher.node.registry, a Book reads a snapshot of them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from launcher.node.meeting import Meeting, PartReport
from launcher.node.state import Phase, RunError
from launcher.planning.layout import Plan

SERVICES = ("data", "rollout", "trainer")
PHASE = "phase"
GENERATION = "generation"


@dataclass(frozen=True)
class Ending:
    """Why a run stops: its final phase, and the error when it failed."""

    phase: Phase
    error: RunError | None = None

    def text(self) -> str:
        return json.dumps({"phase": self.phase, "error": asdict(self.error) if self.error else None})

    @staticmethod
    def of(text: str) -> Ending:
        found = json.loads(text)
        return Ending(Phase(found["phase"]), RunError(**found["error"]) if found["error"] else None)


@dataclass(frozen=True)
class RanksReport:
    """How the ranks of one node stand in one generation."""

    generation: int
    state: str  # running | done | died | failed (another start would not mend it)
    error: RunError | None = None


@dataclass(frozen=True)
class ServerEntry:
    name: str
    url: str
    backend: str
    daemon: str
    state: str  # up | down | out
    started: float = 0.0
    error: RunError | None = None


@dataclass(frozen=True)
class Book:
    values: dict[str, str] = field(default_factory=dict)
    beat_ages: dict[str, float] = field(default_factory=dict)

    @property
    def generation(self) -> int | None:
        text = self.values.get(GENERATION, "")
        return int(text) if text else None

    @property
    def ending(self) -> Ending | None:
        text = self.values.get(PHASE, "")
        return Ending.of(text) if text else None

    def service(self, name: str) -> str | None:
        found = self._json(f"service/{name}")
        return found["url"] if found else None

    def servers(self) -> list[ServerEntry]:
        found = [self._json(key) for key in self.values if key.startswith("server/")]
        return [ServerEntry(**{**each, "error": _error(each["error"])}) for each in found if each]

    def meetings(self) -> dict[str, Meeting]:
        """By server: the start of a head over several nodes that is under way or serves."""
        found = {key.partition("/")[2]: self._json(key) for key in self.values if key.startswith("meeting/")}
        return {name: Meeting(**each) for name, each in found.items() if each}

    def parts(self) -> list[PartReport]:
        """Of servers over several nodes, those that are no heads."""
        found = [self._json(key) for key in self.values if key.startswith("part/")]
        return [PartReport(**each) for each in found if each]

    def daemon(self, node: str) -> str | None:
        found = self._json(f"daemon/{node}")
        return found["url"] if found else None

    def machine(self, node: str) -> str:
        """The host name of a daemon's machine; empty while it has not said so."""
        found = self._json(f"daemon/{node}")
        return found["machine"] if found else ""

    def ranks(self, node: str) -> RanksReport | None:
        found = self._json(f"ranks/{node}")
        return RanksReport(**{**found, "error": _error(found["error"])}) if found else None

    def bye(self, node: str) -> str | None:
        """Why a daemon left, once it did."""
        return self.values.get(f"bye/{node}") or None

    def _json(self, key: str) -> Any:
        text = self.values.get(key, "")
        return json.loads(text) if text else None


def node_names(plan: Plan) -> list[str]:
    return [f"{each.name}-{node.index}" for each in plan.partitions for node in each.nodes]


def keys(plan: Plan) -> list[str]:
    """Every key that a run of this plan can have."""
    nodes = node_names(plan)
    servers = [server for each in plan.partitions for node in each.nodes for server in node.servers]
    return [
        *(PHASE, GENERATION),
        *(f"service/{name}" for name in SERVICES),
        *(f"server/{server.name}" for server in servers if server.part == 0),
        *(f"meeting/{server.name}" for server in servers if server.part == 0 and server.parts > 1),
        *(f"part/{server.process}" for server in servers if server.part > 0),
        *(f"{kind}/{node}" for node in nodes for kind in ("daemon", "ranks", "bye")),
    ]


def address(kind: str, name: str, url: str) -> tuple[str, str]:
    return f"{kind}/{name}", json.dumps({"url": url})


def daemon(node: str, url: str, machine: str) -> tuple[str, str]:
    return f"daemon/{node}", json.dumps({"url": url, "machine": machine})


def server(entry: ServerEntry) -> tuple[str, str]:
    return f"server/{entry.name}", json.dumps(asdict(entry))


def meeting(server: str, found: Meeting | None) -> tuple[str, str]:
    return f"meeting/{server}", json.dumps(asdict(found)) if found else ""


def part(report: PartReport) -> tuple[str, str]:
    return f"part/{report.name}", json.dumps(asdict(report))


def ranks(node: str, report: RanksReport) -> tuple[str, str]:
    return f"ranks/{node}", json.dumps(asdict(report))


def _error(found: dict[str, Any] | None) -> RunError | None:
    return RunError(**found) if found else None
