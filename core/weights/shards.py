"""The safetensors container, without tensors: headers as records, and regions of bytes.

Owns the format (8 bytes of little-endian length, JSON header, data without gaps). Knows no hashes and no manifest, and
imports no torch: dtypes are the format's own names.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from core.weights.errors import CorruptError, WeightsError

DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
MAX_HEADER = 100 << 20
INDEX = "model.safetensors.index.json"


class Entry(NamedTuple):
    """One tensor of a file; start and end count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header_bytes(tensors: Iterable[tuple[str, str, Sequence[int]]]) -> tuple[bytes, list[Entry]]:
    """The first bytes of a file that holds these (name, dtype, shape) in this order, and where each goes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    entries: list[Entry] = []
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + math.prod(shape) * DTYPE_BYTES[dtype]
        entries.append(Entry(name, dtype, tuple(shape), offset, end))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, entries


def read_header(file: BinaryIO, path: Path) -> tuple[bytes, list[Entry]]:
    """The header of an open file, checked against the file's size; entries come in the order of their data."""
    file.seek(0, 2)
    size = file.tell()
    file.seek(0)
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(MAX_HEADER, size - 8):
        raise CorruptError(f"{path}: not a whole safetensors file ({size} bytes)")
    text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = sorted(
            (Entry(name, item["dtype"], tuple(item["shape"]), *item["data_offsets"]) for name, item in header.items()),
            key=lambda entry: (entry.start, entry.end),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{path}: the safetensors header is damaged ({error})") from error
    expected = 0
    for entry in entries:
        bytes_of_one = DTYPE_BYTES.get(entry.dtype)
        if bytes_of_one is None:
            raise WeightsError(f"{path}: tensor {entry.name}: dtype {entry.dtype} is not known here")
        if entry.start != expected or entry.end - entry.start != math.prod(entry.shape) * bytes_of_one:
            raise CorruptError(
                f"{path}: tensor {entry.name}: its place in the file does not fit its shape {list(entry.shape)}"
            )
        expected = entry.end
    if size != 8 + length + expected:
        raise CorruptError(f"{path}: {size} bytes where its header promises {8 + length + expected}")
    return prefix + text, entries


def shard_files(directory: Path) -> list[str]:
    """Names of the weight files of a checkpoint, by its index where it has one, and all of them there."""
    index = directory / INDEX
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if not index.exists():
        if not found:
            raise WeightsError(f"{directory}: no *.safetensors file; give the directory of a whole checkpoint")
        return found
    try:
        listed = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index}: not an index of weight files ({error})") from error
    missing = [name for name in listed if Path(name).name != name or name not in found]
    if missing:
        raise WeightsError(f"{directory}: lacks {', '.join(missing)}, which {INDEX} names; copy the checkpoint again")
    return listed
