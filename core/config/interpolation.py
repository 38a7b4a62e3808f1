"""`${other.key}` in the written values, resolved by OmegaConf over the file and the defaults of the schema."""

import re
from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from pydantic_core import PydanticUndefined

from core.config.base import Section
from core.config.reading import Document, Path, dotted, unwrap

_NAMED = re.compile(r"\$\{([\w.]+)\}")


def resolve(
    document: Document, tree: dict[str, Any], schema: type[Section], filled: set[Path]
) -> tuple[set[Path], dict[Path, list[Path]]]:
    """Replaces every interpolation in `tree`; returns the paths that could not be, with a problem for each, and for
    every interpolated path the paths that it names.

    Of a `filled` path nothing is said: its value was written elsewhere, where the problem is named.
    """
    failed: set[Path] = set()

    def fail(path: Path, error: Exception) -> None:
        failed.add(path)
        put(tree, path, None)
        if path not in filled:
            reason = "goes round in a circle" if isinstance(error, RecursionError) else str(error).splitlines()[0]
            document.problems.append(f"{document.where(path)}: {dotted(path)}: cannot be resolved: {reason}")

    wanted: list[Path] = []
    sources: dict[Path, list[Path]] = {}
    for path, text in list(leaves(tree)):
        if isinstance(text, str) and "${" in text:
            sources[path] = [tuple(named.split(".")) for named in _NAMED.findall(text)]
            try:
                OmegaConf.create({"text": text})
            except GrammarParseError as error:
                fail(path, error)
            else:
                wanted.append(path)
    whole = OmegaConf.create(with_defaults(tree, schema)) if wanted else OmegaConf.create()
    resolved: list[tuple[Path, Any]] = []
    for path in wanted:
        try:
            resolved.append((path, _value(whole, path)))
        except (OmegaConfBaseException, RecursionError, ValueError) as error:
            fail(path, error)
    for path, value in resolved:
        put(tree, path, value)
    return failed, sources


def _value(node: Any, path: Path) -> Any:
    for part in path:
        node = node[part]
    return OmegaConf.to_container(node, resolve=True) if isinstance(node, DictConfig | ListConfig) else node


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def put(tree: dict[str, Any], path: Path, value: Any) -> None:
    here: Any = tree
    for part in path[:-1]:
        here = here[part]
    here[path[-1]] = value


def with_defaults(written: dict[str, Any], schema: type[Section]) -> dict[str, Any]:
    """What is written over what the schema says where nothing is."""
    tree = dict(written)
    for name, found in schema.model_fields.items():
        inner = unwrap(found.annotation)
        section = inner if isinstance(inner, type) and issubclass(inner, Section) else None
        value = written.get(name)
        if section is not None and isinstance(value, dict):
            tree[name] = with_defaults(value, section)
        elif name not in written:
            default = found.get_default(call_default_factory=True)
            if default is PydanticUndefined:
                tree[name] = with_defaults({}, section) if section else "???"
            else:
                tree[name] = _plain(default)
    return tree


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
