"""Files of a run that hold something else than a run writes (a disk that lost blocks, an edit by hand): file and line.

Owns the refusal; what the files mean is their readers'. A torn last line of a file that grows is no damage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.config.errors import UserError


class DamagedError(UserError):
    """The message begins with file:line."""

    def __init__(self, path: Path, line: int, what: str) -> None:
        cure = "restore it from a copy" if path.suffix == ".json" else "restore it from a copy, or mend this line"
        super().__init__(f"{path}:{line}: damaged: {what}; {cure}")


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is no such file."""
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise DamagedError(path, error.lineno, f"not JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise DamagedError(path, 1, "not text") from error
    if not isinstance(found, dict):
        raise DamagedError(path, 1, "not an object")
    return found


@contextmanager
def refusing(path: Path, found: Mapping[str, Any], numbers: Sequence[str] = ()) -> Iterator[None]:
    """What is made of `found` within fails only because of what the file says; `numbers` must be numbers."""
    wrong = [name for name in numbers if not _is_number(found.get(name, 0))]
    if wrong:
        raise DamagedError(path, _line_of(path, wrong[0]), f"{wrong[0]} is {found[wrong[0]]!r:.60}, not a number")
    try:
        yield
    except KeyError as error:
        raise DamagedError(path, 1, f"{error.args[0]} is missing") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedError(path, 1, str(error)) from error


def checked_lines(path: Path, numbers: Sequence[str]) -> list[dict[str, Any]]:
    """As core.telemetry.files.read_lines; every object has these numbers."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(data.split(b"\n"), 1):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if not isinstance(row, dict):
            continue
        wrong = [name for name in numbers if not _is_number(row.get(name))]
        if wrong:
            raise DamagedError(path, number, f"no number {wrong[0]}")
        rows.append(row)
    return rows


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _line_of(path: Path, key: str) -> int:
    lines = path.read_text().splitlines()
    return next((number for number, line in enumerate(lines, 1) if f'"{key}"' in line), 1)
