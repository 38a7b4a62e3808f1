"""Copies of a frozen configuration with some keys changed."""

from __future__ import annotations

from typing import Any


def get_value(section: Any, key: str) -> Any:
    """The value at a dotted key; None where an optional section above it is absent."""
    for part in key.split("."):
        if section is None:
            return None
        section = getattr(section, part)
    return section


def with_value(section: Any, key: str, value: Any) -> Any:
    """A copy with one dotted key changed; the value is not validated."""
    first, _, rest = key.partition(".")
    return section.model_copy(update={first: with_value(getattr(section, first), rest, value) if rest else value})
