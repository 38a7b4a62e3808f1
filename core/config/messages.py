"""What pydantic found wrong, said so that a person can mend it."""

from collections.abc import Sequence
from typing import Any

from pydantic_core import ErrorDetails

from core.config.base import Section, scalar_kinds
from core.config.names import names_at, nearest, nearest_key
from core.config.reading import Document, Path, child, dotted
from core.config.slurm import WANTED

_SECRET = ("key", "token", "password", "secret")


def explain(error: ErrorDetails, document: Document, schema: type[Section]) -> tuple[Path, str]:
    """The path that is wrong, and the line that says so."""
    path = _written_path(error["loc"], error["type"], schema)
    if error["type"] == "missing":
        return path, f"{document.where(path)}: {dotted(path)}: must be set"
    return path, f"{document.where(path)}: {dotted(path)}: {_reason(error, path, schema)}"


def _reason(error: ErrorDetails, path: Path, schema: type[Section]) -> str:
    found = _shown(error["input"], path)
    context = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            near = nearest_key(schema, path)
            if near:
                return f"unknown key; did you mean {near}?"
            known = names_at(schema, path[:-1])
            return "unknown key; known here: " + ", ".join(known) if known else "unknown key"
        case "literal_error":
            choices = [str(choice).strip("'") for choice in _choices(context)]
            near = nearest(str(error["input"]), choices)
            hint = f"; did you mean {near}?" if near else ""
            return f"wants one of {', '.join(choices)}; found {found}{hint}"
        case "int_parsing" | "int_type" | "int_from_float":
            return f"wants a whole number; found {found}"
        case "float_parsing" | "float_type" | "finite_number":
            return f"wants a number; found {found}"
        case "bool_parsing" | "bool_type":
            return f"wants true or false; found {found}"
        case "string_type":
            return f"wants text; found {found}"
        case "string_pattern_mismatch":
            name = "letters, digits, '.', '_' and '-', beginning with a letter or digit"
            return f"wants {WANTED.get(str(path[-1]), name)}; found {found}"
        case "greater_than_equal":
            return f"wants at least {context['ge']}; found {found}"
        case "greater_than":
            return f"wants more than {context['gt']}; found {found}"
        case "less_than_equal":
            return f"wants at most {context['le']}; found {found}"
        case "less_than":
            return f"wants less than {context['lt']}; found {found}"
        case "model_type" | "model_attributes_type" | "dict_type":
            names = names_at(schema, path)
            return f"wants a section (keys {', '.join(names[:8])} …); found {found}"
        case "tuple_type" | "list_type":
            return f"wants a list; found {found}"
        case "value_error":
            return f"{context['error']}; found {found}"
    return f"{error['msg']}; found {found}"


def _choices(context: dict[str, Any]) -> Sequence[str]:
    text = str(context.get("expected", "")).replace(" or ", ", ")
    return [choice for choice in text.split(", ") if choice]


def _written_path(location: Sequence[str | int], kind: str, schema: type[Section]) -> Path:
    """pydantic's location without the names of union members that it appends."""
    annotation: Any = schema
    path: list[str | int] = []
    for part in location:
        below = child(annotation, part)
        last = part == location[-1] and kind in ("extra_forbidden", "missing")
        if below is None and path and not last and scalar_kinds(annotation):
            break
        path.append(part)
        annotation = below
    return tuple(path)


def _shown(value: object, path: Path) -> str:
    if any(word in str(path[-1]).lower().split("_") for word in _SECRET):
        return "a value that is not shown here"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
