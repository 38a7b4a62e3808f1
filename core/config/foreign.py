"""Keys of AReaL that have no meaning here: dropped with one warning at their default, refused by name otherwise."""

from collections.abc import Callable, Iterator
from typing import Any

from core.config.base import ANYTHING, Foreign, Section
from core.config.names import nearest
from core.config.reading import Document, Path, child, dotted, unwrap


def drop_foreign(document: Document, tree: dict[str, Any], schema: type[Section], warn: Callable[[str], None]) -> None:
    """Removes every foreign key from `tree`."""
    for path, holder, key, foreign in list(_found(tree, schema, ())):
        value = holder.pop(key)
        if value in foreign.silent:
            continue
        wrong = list(_differences(value, foreign.default, foreign.also, path))
        if not wrong:
            warn(f"{document.where(path)}: {dotted(path)} {foreign.why}; accepted, without effect")
        for at, said in wrong:
            document.problems.append(f"{document.where(at)}: {dotted(at)}: {said}: {dotted(path)} {foreign.why}")


def _found(tree: Any, annotation: Any, path: Path) -> Iterator[tuple[Path, dict[str, Any], str, Foreign]]:
    if isinstance(tree, dict):
        section = unwrap(annotation)
        foreign = section.foreign if isinstance(section, type) and issubclass(section, Section) else {}
        for key, item in tree.items():
            if key in foreign:
                yield (*path, key), tree, key, foreign[key]
            else:
                yield from _found(item, child(annotation, key), (*path, key))
    elif isinstance(tree, list):
        for index, item in enumerate(tree):
            yield from _found(item, child(annotation, index), (*path, index))


def _differences(value: Any, default: Any, also: tuple[object, ...], path: Path) -> Iterator[tuple[Path, str]]:
    if value is None or default is ANYTHING or value == default or value in also:
        return
    if isinstance(value, dict) and isinstance(default, dict):
        for key, item in value.items():
            if key in default:
                yield from _differences(item, default[key], (), (*path, key))
            else:
                near = nearest(str(key), default)
                yield (*path, key), "unknown key" + (f", did you mean {dotted((*path, near))}?" if near else "")
        return
    shown = "true" if default is True else "false" if default is False else "null" if default is None else repr(default)
    yield path, f"{_brief(value)} is not supported, leave it out or at its default ({shown})"


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
