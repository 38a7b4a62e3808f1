"""YAML text into plain values, with the line of every key.

Owns what a scalar means (for a field that wants text, `1e3`, `010` and `on` stay as they are written; a number may be
spelled 2e-6) and the bounds on what a file may expand to. Knows the schema only to tell text from numbers.
"""

import os
import types
import typing
from dataclasses import dataclass, field
from typing import Any

import yaml
from typing_extensions import is_typeddict

from core.config.base import Section, number, scalar_kinds

MAX_BYTES = 4 << 20
MAX_NODES = 20_000
MAX_DEPTH = 40

Path = tuple[str | int, ...]
_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + kind for kind in ("null", "bool", "int", "float", "str", "timestamp", "value")}


class TooLarge(Exception):
    """The document expands to more than the bounds allow."""


@dataclass
class Document:
    """Values, the source line of every path, and what is wrong with the text itself."""

    source: str
    tree: dict[str, Any] = field(default_factory=dict)
    marks: dict[Path, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def where(self, path: Path) -> str:
        """`file:line` of the nearest ancestor that was written, or the override that wrote it."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.marks:
                return self.marks[path[:end]]
        return self.source


def read_text(path: os.PathLike[str]) -> str:
    """No more than what read_document refuses: a path may be a device without an end. Raises OSError or ValueError."""
    with open(path, "rb") as file:  # noqa: PTH123 -- any path-like
        return file.read(MAX_BYTES + 1).decode()


def read_document(text: str, source: str, schema: type[Section]) -> Document:
    """Everything that is wrong with the text is in `problems`; the tree holds the rest."""
    document = Document(source)
    if len(text.encode()) > MAX_BYTES:
        document.problems.append(f"{source}: larger than {MAX_BYTES >> 20} MiB, which no configuration is")
        return document
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        line = f":{mark.line + 1}" if mark else ""
        document.problems.append(f"{source}{line}: not YAML: {error.problem or error.context}")
        return document
    except (yaml.YAMLError, RecursionError) as error:
        document.problems.append(f"{source}: not YAML: {str(error).splitlines()[0]}")
        return document
    if node is None:
        return document
    if not isinstance(node, yaml.MappingNode):
        document.problems.append(f"{source}:1: the top level must be `key: value` lines")
        return document
    try:
        document.tree = _Builder(document, lambda mark: f"{source}:{mark.line + 1}").build(node, (), schema)
    except TooLarge as error:
        document.problems.append(f"{source}: {error}")
        document.tree = {}
    return document


def read_value(text: str, path: Path, annotation: Any, document: Document, where: str) -> Any:
    """The value of an override, read as it would be in the file. Raises ValueError when it is not YAML."""
    kinds = scalar_kinds(annotation)
    if kinds and kinds <= {str} and text.strip() not in ("null", "~", "") and text[:1] not in "'\"":
        return text
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(getattr(error, "problem", None) or error).splitlines()[0]) from error
    if node is None:
        return "" if kinds == {str} and text.strip() == "" else None
    try:
        return _Builder(document, lambda mark: where).build(node, path, annotation)
    except TooLarge as error:
        raise ValueError(str(error)) from error


class _Builder:
    def __init__(self, document: Document, place: typing.Callable[[Any], str]) -> None:
        self.document = document
        self.place = place
        self.nodes = 0

    def build(self, node: yaml.Node, path: Path, annotation: Any) -> Any:
        self.nodes += 1
        if self.nodes > MAX_NODES or len(path) > MAX_DEPTH:
            raise TooLarge(f"expands to more than {MAX_NODES} values or {MAX_DEPTH} levels: too many YAML aliases")
        self.document.marks.setdefault(path, self.place(node.start_mark))
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, path, annotation)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*path, i), child(annotation, i)) for i, item in enumerate(node.value)]
        return self.scalar(node, path, annotation)

    def mapping(self, node: yaml.MappingNode, path: Path, annotation: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = self.place(key_node.start_mark)
            if key_node.tag == _TAG + "merge":
                sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for source in sources:
                    found = self.build(source, path, annotation)
                    merged = {**found, **merged} if isinstance(found, dict) else merged
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self.document.problems.append(f"{place}: {dotted(path) or 'top level'}: a key must be plain text")
                continue
            key = key_node.value
            if key in values:
                self.document.problems.append(f"{place}: {dotted((*path, key))}: written twice")
            self.document.marks[(*path, key)] = place
            values[key] = self.build(value_node, (*path, key), child(annotation, key))
        return {**merged, **values}

    def scalar(self, node: yaml.Node, path: Path, annotation: Any) -> Any:
        if node.tag not in _SCALARS:
            place = self.place(node.start_mark)
            self.document.problems.append(f"{place}: {dotted(path)}: the tag {node.tag} is not allowed here")
            return None
        text: str = node.value
        if node.tag == _TAG + "null":
            return None
        kinds = scalar_kinds(annotation)
        quoted = getattr(node, "style", None) in ("'", '"', "|", ">")
        if quoted or (kinds and kinds <= {str}):
            return text
        if node.tag == _TAG + "bool":
            return yaml.SafeLoader.bool_values[text.lower()]
        return number(text)


def child(annotation: Any, key: str | int) -> Any:
    """The annotation below `key`, or None where the schema does not say."""
    annotation = unwrap(annotation)
    origin = typing.get_origin(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        found = annotation.model_fields.get(str(key))
        return found.annotation if found else None
    if is_typeddict(annotation):
        return typing.get_type_hints(annotation, include_extras=True).get(str(key))
    if origin is dict:
        return typing.get_args(annotation)[1]
    if origin in (tuple, list) and isinstance(key, int):
        return typing.get_args(annotation)[0]
    return None


def unwrap(annotation: Any) -> Any:
    """Without Annotated and without `| None`."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return unwrap(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
        return unwrap(parts[0]) if len(parts) == 1 else annotation
    return annotation


def dotted(path: Path) -> str:
    return ".".join(str(part) for part in path)
