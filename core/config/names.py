"""The names the schema knows, and the nearest one to a name it does not know."""

import difflib
from collections.abc import Iterable
from functools import cache
from typing import Any

from typing_extensions import is_typeddict

from core.config.base import Section
from core.config.reading import Path, child, dotted, unwrap


@cache
def known_keys(schema: type[Section], prefix: Path = ()) -> tuple[str, ...]:
    """Every dotted key of the schema, optional sections included."""
    keys: list[str] = []
    for name, found in schema.model_fields.items():
        path = (*prefix, name)
        keys.append(dotted(path))
        inner = unwrap(found.annotation)
        if isinstance(inner, type) and issubclass(inner, Section):
            keys.extend(known_keys(inner, path))
        elif is_typeddict(inner):
            keys.extend(dotted((*path, key)) for key in inner.__annotations__)
    return tuple(keys)


def names_at(schema: type[Section], path: Path) -> list[str]:
    """The names that may stand below `path`."""
    annotation: Any = schema
    for key in path:
        annotation = child(annotation, key)
    inner = unwrap(annotation)
    if isinstance(inner, type) and issubclass(inner, Section):
        return [*inner.model_fields, *inner.foreign]
    return list(inner.__annotations__) if is_typeddict(inner) else []


def nearest_key(schema: type[Section], path: Path) -> str | None:
    """The dotted key that an unknown one was probably meant to be."""
    name = str(path[-1]).lstrip("+")
    names = names_at(schema, path[:-1])
    near = nearest(name, names, cutoff=0.8)
    if near:
        return dotted((*path[:-1], near))
    keys = known_keys(schema)
    same = [key for key in keys if key.rsplit(".", 1)[-1] == name]
    if same:
        return max(same, key=lambda key: difflib.SequenceMatcher(None, key, dotted(path)).ratio())
    near = nearest(name, names, cutoff=0.65)
    if near:
        return dotted((*path[:-1], near))
    found = difflib.get_close_matches(dotted(path), keys, n=1, cutoff=0.75)
    return found[0] if found else None


def nearest(name: str, names: Iterable[object], cutoff: float = 0.6) -> str | None:
    lowered = {str(candidate).lower(): str(candidate) for candidate in names}
    found = difflib.get_close_matches(name.lower(), list(lowered), n=1, cutoff=cutoff)
    return lowered[found[0]] if found else None
