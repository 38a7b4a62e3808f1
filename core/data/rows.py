"""Rows of a dataset in parquet, as the hub ships them, read at random without holding the whole set.

Owns files, splits, row numbers and column values. Whether a row is any good is core.data.prompts' business.
"""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

CACHED_BYTES = 256 << 20
NEEDED_COLUMNS = ("problem", "answer")


class RowsError(Exception):
    """A dataset that cannot be read; the message names the file. `present`: other splits are there."""

    def __init__(self, message: str, *, present: bool = False) -> None:
        super().__init__(message)
        self.present = present


@dataclass(frozen=True)
class Row:
    index: int
    place: str  # file:row, for messages
    columns: dict[str, Any]


def split_files(path: Path, *names: str) -> list[Path]:
    """Parquet files of a split: the file itself, or `<name>-*.parquet` / `<name>.parquet` in `path` or its data/.

    The first of `names` that has files is taken. Raises RowsError.
    """
    if path.is_file():
        return [path]
    for name in names:
        for place in (path, path / "data", path / name):
            if files := sorted({*place.glob(f"{name}-*.parquet"), *place.glob(f"{name}.parquet")}):
                return files
    near = [*path.glob("*.parquet"), *path.glob("*/*.parquet")]  # not all below: `path` may be any directory
    present = sorted(str(file.relative_to(path)) for file in near)[:8]
    wanted = " or ".join(f"{name}-*.parquet" for name in names)
    there = ", ".join(present) or "no parquet file at all"
    raise RowsError(f"{path} has no {wanted}; it has {there}", present=bool(present))


class Rows:
    """The rows of one split, by number.

    Row groups are decoded whole; the last ones used stay decoded, up to CACHED_BYTES. Safe to use from several threads.
    """

    def __init__(self, files: list[Path], *, max_rows: int | None = None) -> None:
        self.files = files
        self._groups: list[tuple[int, int]] = []  # (file, row group) by number
        self._starts: list[int] = []  # first row of each
        self._file_starts: list[int] = []
        self._readers: list[pq.ParquetFile] = []
        total = 0
        for number, file in enumerate(files):
            reader = _open(file)
            self._readers.append(reader)
            self._file_starts.append(total)
            for group in range(reader.num_row_groups):
                self._groups.append((number, group))
                self._starts.append(total)
                total += reader.metadata.row_group(group).num_rows
        self.count = total if max_rows is None else min(total, max_rows)
        self.columns = tuple(self._readers[0].schema_arrow.names)
        self._decoded: OrderedDict[int, pa.Table] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.count

    @property
    def root(self) -> Path:
        """The directory below which paths in the rows must lie."""
        return self.files[0].parent

    @property
    def first_bytes(self) -> int:
        """Of the first row group, decoded."""
        return self._readers[0].metadata.row_group(0).total_byte_size if self._starts else 0

    def place(self, index: int) -> str:
        """`file:row` of a row, counted from 0 within its file."""
        number = bisect.bisect_right(self._file_starts, index) - 1
        return f"{self.files[number].name}:{index - self._file_starts[number]}"

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self.count:
            raise IndexError(index)
        group = bisect.bisect_right(self._starts, index) - 1
        table = self._table(group)
        columns = table.slice(index - self._starts[group], 1).to_pylist()[0]
        return Row(index=index, place=self.place(index), columns=columns)

    def _table(self, group: int) -> pa.Table:
        with self._lock:
            if group in self._decoded:
                self._decoded.move_to_end(group)
                return self._decoded[group]
            number, within = self._groups[group]
            try:
                table = self._readers[number].read_row_group(within)
            except (pa.ArrowException, OSError) as error:
                raise RowsError(f"{self.files[number]}: row group {within} cannot be read: {error}") from error
            self._decoded[group] = table
            while len(self._decoded) > 1 and sum(kept.nbytes for kept in self._decoded.values()) > CACHED_BYTES:
                self._decoded.popitem(last=False)
            return table


def _open(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file.absolute())  # a relative one with a colon would be read as a URI
    except (pa.ArrowException, OSError) as error:
        raise RowsError(f"{file} is not readable parquet: {error}") from error
