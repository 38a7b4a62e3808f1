"""The flags of the tested server versions, as bench/server_flags.py read them from the real parsers.

Owns the lists; what the configuration makes of a name that is on none of them is core.config.checks'.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Flags:
    """The flags of every tested version of one server; the newest version's word counts."""

    versions: tuple[str, ...]
    entries: dict[str, dict[str, Any]]

    def has(self, name: str) -> bool:
        return self._entry(name) is not None

    def names(self) -> list[str]:
        return list(self.entries)

    def spelling(self, name: str) -> str:
        """The option itself; for no_X of a flag X that can be said both ways, X."""
        entry = self._entry(name)
        return entry["flag"] if entry else "--" + name.replace("_", "-")

    def kind(self, name: str) -> str:
        """switch (only true can be said), both, value or list; a name on no list is taken for a switch or a value."""
        entry = self._entry(name)
        return entry["kind"] if entry else "unknown"

    def choices(self, name: str) -> list[str]:
        return (self._entry(name) or {}).get("choices", [])

    def is_default(self, name: str, value: Any) -> bool:
        entry = self._entry(name)
        if entry is None:
            return False
        if entry is not self.entries.get(name):  # no_X
            return value is False or entry["default"] is False
        return entry["default"] is not None and entry["default"] == (list(value) if isinstance(value, tuple) else value)

    def _entry(self, name: str) -> dict[str, Any] | None:
        found = self.entries.get(name)
        if found is None and name.startswith("no_"):
            found = self.entries.get(name.removeprefix("no_"))
            return found if found is not None and found["kind"] == "both" else None
        return found


@cache
def flags_of(backend: str) -> Flags:
    files = sorted(_HERE.glob(f"{backend}-*.json"), key=lambda path: _numbers(path.stem))
    entries: dict[str, dict[str, Any]] = {}
    versions = []
    for file in files:
        read = json.loads(file.read_text())
        versions.append(read["version"])
        entries |= read["flags"]
    return Flags(tuple(versions), entries)


def _numbers(stem: str) -> tuple[int, ...]:
    return tuple(int(part) for part in stem.rpartition("-")[2].split(".") if part.isdecimal())
