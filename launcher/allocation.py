"""The grammar of allocation_mode, and nothing else.

    allocation := group ("+" group)*            separate GPUs
    group      := component ("|" component)*    the same GPUs; binds tighter than "+"
    component  := [backend ["[" name "]"] ":"] dims  |  "eval"  |  "cpu"
    dims       := (letter number)+              letters d p t c e, each at most once, any order; missing = 1

Knows no cluster and no model: whether an allocation can run is judged by launcher.plan.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from functools import cached_property

from core.config.errors import UserError

INFERENCE_BACKENDS = ("sglang", "vllm", "embedded")
TRAINING_BACKENDS = ("archon", "fsdp")
AXES = "dptce"
_KNOWN_NOT_BUILT = ("megatron",)
_ROLES_NOT_BUILT = ("eval", "cpu")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER = re.compile(r"[0-9]+")
_MAX_DIGITS = 6


class AllocationError(UserError):
    """An allocation string that is not in the grammar, or names what is not built; str() has the caret."""

    def __init__(self, message: str, text: str, start: int, end: int | None = None) -> None:
        self.message = message
        self.text = text
        self.start = start
        self.end = max(end if end is not None else start + 1, start + 1)
        super().__init__(f"{message}\n{self.pointer()}")

    def pointer(self) -> str:
        return pointer(self.text, self.start, self.end)


def pointer(text: str, start: int, end: int) -> str:
    """The string and carets under [start, end), indented as every error of ours is; one column for each character."""
    shown = "".join(character if character.isprintable() else "?" for character in text)
    return f"    {shown}\n    {' ' * start}{'^' * max(1, end - start)}"


@dataclass(frozen=True)
class Dims:
    d: int = 1
    p: int = 1
    t: int = 1
    c: int = 1
    e: int = 1

    @property
    def world(self) -> int:
        """GPUs; e (experts) divides what the others count and multiplies nothing."""
        return self.d * self.replica

    @property
    def replica(self) -> int:
        """GPUs of one replica: what a server spans."""
        return self.p * self.t * self.c

    def __str__(self) -> str:
        return f"d{self.d}" + "".join(f"{axis}{getattr(self, axis)}" for axis in AXES[1:] if getattr(self, axis) != 1)


@dataclass(frozen=True)
class Component:
    """One partition as written; `span` and `dims_span` are its columns in the text and no part of its identity."""

    backend: str
    dims: Dims
    name: str | None = None
    span: tuple[int, int] = field(default=(0, 0), compare=False)
    dims_span: tuple[int, int] = field(default=(0, 0), compare=False)

    @property
    def is_inference(self) -> bool:
        return self.backend in INFERENCE_BACKENDS

    def __str__(self) -> str:
        name = f"[{self.name}]" if self.name else ""
        return f"{self.backend}{name}:{self.dims}"


@dataclass(frozen=True)
class Allocation:
    """Groups of components: groups have GPUs of their own, the components of one group share theirs."""

    groups: tuple[tuple[Component, ...], ...]
    text: str = field(default="", compare=False)

    @cached_property
    def components(self) -> tuple[Component, ...]:
        return tuple(component for group in self.groups for component in group)

    @property
    def world(self) -> int:
        return sum(group[0].dims.world for group in self.groups)

    def __str__(self) -> str:
        return "+".join("|".join(str(component) for component in group) for group in self.groups)


def parse(text: str) -> Allocation:
    """Reads an allocation string; raises AllocationError with a caret under the offending column."""
    return _Parser(text).allocation()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def allocation(self) -> Allocation:
        groups = [self.group()]
        while self.take("+"):
            groups.append(self.group())
        if self.at < len(self.text):
            raise self.error(f"{self.text[self.at]!r} is not expected here; components are joined by '+' or '|'")
        allocation = Allocation(tuple(groups), self.text)
        self.check_names(allocation)
        return allocation

    def group(self) -> tuple[Component, ...]:
        components = [self.component()]
        while self.take("|"):
            components.append(self.component())
        first = components[0]
        for other in components[1:]:
            if other.dims.world != first.dims.world:
                raise AllocationError(
                    f"colocated components share their GPUs, but {first.backend}:{first.dims} wants "
                    f"{first.dims.world} and {other.backend}:{other.dims} wants {other.dims.world}",
                    self.text,
                    *other.dims_span,
                )
        return tuple(components)

    def component(self) -> Component:
        self.skip_spaces()
        start = self.at
        if self.text.startswith("(", start):
            raise self.error("the form (attn:…|ffn:…) is known but not built: dense models need no expert layout")
        word = _WORD.match(self.text, start)
        if word and self.text.startswith((":", "["), word.end()):
            backend = self.backend(word)
            self.at = word.end()
            name = self.name()
            if not self.text.startswith(":", self.at):
                raise self.error(f"':' and dims are expected after {self.text[start : self.at]}, as in {backend}:d4")
            self.at += 1
            if self.text.startswith("(", self.at):
                raise self.error("the form (attn:…|ffn:…) is known but not built: dense models need no expert layout")
        elif word and word.group() in _ROLES_NOT_BUILT:
            raise self.error(f"a component {word.group()!r} is known but not built", start, word.end())
        elif word and word.group() in INFERENCE_BACKENDS + TRAINING_BACKENDS:
            raise self.error(f"':' and dims are expected after {word.group()}, as in {word.group()}:d4", word.end())
        else:
            backend, name = "archon", None
        dims_start = self.at
        dims = self.dims()
        return Component(backend, dims, name, (start, self.at), (dims_start, self.at))

    def backend(self, word: re.Match[str]) -> str:
        backend = word.group()
        known = INFERENCE_BACKENDS + TRAINING_BACKENDS
        if backend in known:
            return backend
        if backend in _KNOWN_NOT_BUILT:
            message = f"backend {backend!r} is known but not built; training backends are {_listed(TRAINING_BACKENDS)}"
        else:
            near = difflib.get_close_matches(backend, known, n=1)
            guess = f"; did you mean {near[0]!r}?" if near else ""
            message = (
                f"backend {backend!r} is unknown: inference has {_listed(INFERENCE_BACKENDS)}, "
                f"training {_listed(TRAINING_BACKENDS)}{guess}"
            )
        raise self.error(message, word.start(), word.end())

    def name(self) -> str | None:
        if not self.text.startswith("[", self.at):
            return None
        match = _NAME.match(self.text, self.at + 1)
        if not match:
            raise self.error("a name of letters, digits and '_' is expected in the brackets", self.at + 1)
        if not self.text.startswith("]", match.end()):
            raise self.error("']' is expected after the name", match.end())
        self.at = match.end() + 1
        return match.group()

    def dims(self) -> Dims:
        sizes: dict[str, int] = {}
        while self.at < len(self.text) and self.text[self.at] not in " \t+|":
            axis, start = self.text[self.at], self.at
            if axis not in AXES:
                raise self.error(f"{axis!r} is no dimension; d is data, p pipeline, t tensor, c context, e expert")
            if axis in sizes:
                raise self.error(f"dimension {axis!r} is given twice")
            number = _NUMBER.match(self.text, start + 1)
            if not number:
                raise self.error(f"a number is expected after {axis!r}, as in {axis}2", start, start + 1)
            if len(number.group()) > _MAX_DIGITS:
                raise self.error(f"{axis!r} is larger than any cluster", start, number.end())
            if int(number.group()) == 0:
                raise self.error(f"{axis}0: a dimension is at least 1", start, number.end())
            sizes[axis] = int(number.group())
            self.at = number.end()
        if not sizes:
            raise self.error("dims are expected here, as in d4 or d2t2")
        return Dims(**sizes)

    def check_names(self, allocation: Allocation) -> None:
        components = allocation.components
        seen: set[str] = set()
        for component in components:
            if len(components) > 2 and component.name is None:
                raise self.error("three or more components need names, as in archon[actor]:d4", *component.span)
            if component.name is not None and component.name in seen:
                raise self.error(f"the name {component.name!r} is given twice", *component.span)
            if component.name is not None:
                seen.add(component.name)

    def take(self, symbol: str) -> bool:
        self.skip_spaces()
        if self.text.startswith(symbol, self.at):
            self.at += 1
            return True
        return False

    def skip_spaces(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1

    def error(self, message: str, start: int | None = None, end: int | None = None) -> AllocationError:
        return AllocationError(message, self.text, self.at if start is None else start, end)


def _listed(words: tuple[str, ...]) -> str:
    return ", ".join(words)
