"""`key.sub=value` arguments, laid over the tree of a file."""

import re
from typing import Any

from core.config.base import Section
from core.config.names import nearest_key
from core.config.reading import Document, Path, child, dotted, read_value


def apply_override(document: Document, text: str, schema: type[Section]) -> None:
    """Sets one key; what is wrong with it goes to the document's problems, naming the override."""
    where = f"override '{text}'"
    key, separator, value_text = text.partition("=")
    path = _split(key.strip())
    if not separator or path is None:
        document.problems.append(f"{where}: wants key.sub=value")
        return
    annotation: Any = schema
    for part in path:
        annotation = child(annotation, part)
    try:
        value = read_value(value_text, path, annotation, document, where)
    except ValueError as error:
        document.problems.append(f"{where}: {dotted(path)}: not a YAML value: {error}")
        return
    for depth in range(1, len(path)):
        document.marks.setdefault(path[:depth], where)
    stuck = _put(document.tree, path, value)
    if stuck is not None:
        near = nearest_key(schema, path)
        hint = f"; did you mean {near}?" if near and near != dotted(path) else ""
        document.problems.append(f"{where}: {dotted(stuck)} is not a section, nothing can be set below it{hint}")
        return
    for mark in [mark for mark in document.marks if mark[: len(path)] == path]:
        document.marks[mark] = where
    document.marks[path] = where


def _split(key: str) -> Path | None:
    """a.b[0].c and a.b.0.c are the same path."""
    parts = re.sub(r"\[(\d+)\]", r".\1", key).split(".")
    if not all(parts):
        return None
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def _put(tree: dict[str, Any], path: Path, value: Any) -> Path | None:
    """Sets the value, making sections on the way; returns the path that is in the way, if any."""
    here: Any = tree
    for depth, part in enumerate(path[:-1]):
        if isinstance(here, list):
            if not isinstance(part, int) or part > len(here):
                return path[:depth]
            if part == len(here):
                here.append({})
            here = here[part]
        elif isinstance(here, dict):
            part = str(part)
            if here.get(part) is None:
                here[part] = [] if isinstance(path[depth + 1], int) else {}
            here = here[part]
        if not isinstance(here, dict | list):
            return path[: depth + 1]
    last = path[-1]
    if isinstance(here, list):
        if not isinstance(last, int) or last > len(here):
            return path[:-1]
        here[last : last + 1] = [value]
    else:
        here[str(last)] = value
    return None
