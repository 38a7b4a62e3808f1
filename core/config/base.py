"""What every section of the configuration shares: frozen, no unknown keys, numbers written as text are numbers.

Owns the base class and the two marks a field may carry: NotBuilt (parsed, refused by name when it is used) and Foreign
(of AReaL, without meaning here: accepted with one warning at its default or null, refused by name otherwise).
"""

import re
import types
import typing
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

MOST = 2**63 - 1
NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class NotBuilt:
    """Marks a field whose values other than `built` (its default, when that is empty) are known but not built."""

    built: tuple[object, ...] = ()


class Anything:
    """As a Foreign default: whatever is written is accepted with the warning."""

    def __repr__(self) -> str:
        return "anything"


ANYTHING = Anything()


@dataclass(frozen=True)
class Foreign:
    """A key that has no meaning here: its default, other values that say the same, and why it has none.

    A value in `silent` is what is done anyway: nothing is said about it.
    """

    default: Any = None
    also: tuple[object, ...] = ()
    silent: tuple[object, ...] = ()
    why: str = "has no meaning here"


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)

    foreign: ClassVar[dict[str, Foreign]] = {}

    @field_validator("*", mode="before")
    @classmethod
    def _plain_value(cls, value: Any, info: ValidationInfo) -> Any:
        kinds = scalar_kinds(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, bool) and bool not in kinds and kinds & {int, float}:
            raise ValueError("a number is wanted, not true or false")
        if isinstance(value, str) and kinds & {int, float} and str not in kinds:
            value = number(value)
        if isinstance(value, int) and abs(value) > MOST:
            raise ValueError("a number of at most 64 bits is wanted")
        return value


def scalar_kinds(annotation: Any) -> set[type]:
    """The scalar types a value of this annotation may have; empty for sections and containers."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return scalar_kinds(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return set().union(*(scalar_kinds(part) for part in typing.get_args(annotation)))
    if origin is typing.Literal:
        return {type(choice) for choice in typing.get_args(annotation)}
    return {annotation} if annotation in (str, int, float, bool) else set()


def number(text: str) -> int | float | str:
    """The number that `text` spells (2e-6, 1_000, 0x10), or the text itself, for pydantic to refuse."""
    stripped = text.strip()
    if re.fullmatch(r"[-+]?0[xX][0-9a-fA-F]+", stripped):
        return int(stripped, 16)
    if not NUMBER.fullmatch(stripped):
        return text
    try:
        return int(stripped)
    except ValueError:
        return float(stripped)
