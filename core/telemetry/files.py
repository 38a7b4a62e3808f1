"""Files that other processes read while we write them.

A file that is read whole appears at once or not at all (write_atomic); a file that grows is framed by lines, each
written by a single O_APPEND write, and a torn last line is ignored by its readers.
"""

import json
import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replaces `path` by `data`: temporary file, fsync, rename, fsync of the directory. Mode 0600."""
    if isinstance(data, str):
        data = data.encode()
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def append_line(path: Path, obj: dict) -> None:
    """Appends one JSON line in a single write. After a torn tail it starts on a line of its own.

    Numbers that JSON does not know (nan, inf) are written as null.
    """
    try:
        line = json.dumps(obj, separators=(",", ":"), allow_nan=False)
    except ValueError:
        line = json.dumps(_finite(obj), separators=(",", ":"))
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        data = ("\n" if torn else "") + line + "\n"
        view = memoryview(data.encode())
        while view:
            view = view[os.write(handle, view) :]
    finally:
        os.close(handle)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def read_lines(path: Path) -> list[dict]:
    """Every whole JSON object of a line-framed file; a torn line and a missing file give nothing."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    rows: list[dict] = []
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows
