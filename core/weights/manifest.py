"""What a version on disk consists of, byte for byte: written by its publisher, checked by every reader.

Owns the manifest's format, its digest, and the comparison of a directory with it. Copies nothing and loads nothing.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import xxhash

from core.weights.errors import CorruptError, MismatchError, NotVisibleError, WeightsError
from core.weights.shards import Entry, read_header, shard_files

NAME = "manifest.json"
VerifyMode = Literal["full", "sizes"]
CHUNK = 8 << 20
_POLL_SECS = 0.05
T = TypeVar("T")


@dataclass(frozen=True)
class TensorRecord:
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    xxh3: str
    file: str


@dataclass(frozen=True)
class FileRecord:
    """xxh3 is that of the whole file, and of a *.safetensors file that of its header: its tensors have their own."""

    bytes: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    version: int
    generation: int
    lineage: tuple[tuple[int, int], ...]
    tensors: Mapping[str, TensorRecord] = field(default_factory=dict)
    files: Mapping[str, FileRecord] = field(default_factory=dict)

    def to_json(self) -> bytes:
        """The same bytes for the same content, whoever writes them."""
        tree = {
            "version": self.version,
            "generation": self.generation,
            "lineage": [list(pair) for pair in self.lineage],
            "tensors": {name: vars(record) for name, record in sorted(self.tensors.items())},
            "files": {name: vars(record) for name, record in sorted(self.files.items())},
        }
        return json.dumps(tree, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        return xxhash.xxh3_128_hexdigest(self.to_json())

    @property
    def weight_bytes(self) -> int:
        return sum(record.bytes for record in self.tensors.values())

    @classmethod
    def from_json(cls, data: bytes, where: Path) -> Manifest:
        try:
            tree = json.loads(data)
            manifest = cls(
                version=int(tree["version"]),
                generation=int(tree["generation"]),
                lineage=tuple((int(version), int(generation)) for version, generation in tree["lineage"]),
                tensors={
                    name: TensorRecord(**{**record, "shape": tuple(record["shape"])})
                    for name, record in tree["tensors"].items()
                },
                files={name: FileRecord(**record) for name, record in tree["files"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptError(f"{where}: not a manifest ({error})") from error
        for name in manifest.files:
            if Path(name).name != name or name in {"", ".", "..", NAME}:
                raise CorruptError(f"{where}: names a file outside of its directory: {name!r}")
        for name, record in manifest.tensors.items():
            if record.file not in manifest.files:
                raise CorruptError(f"{where}: tensor {name} lies in {record.file!r}, which is not listed")
        return manifest


def read_manifest(directory: Path, digest: str, visible_secs: float = 0.0) -> Manifest:
    """The manifest with this digest; waits up to `visible_secs` for it to appear whole (shared file systems lag)."""
    path = directory / NAME

    def read() -> Manifest:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise NotVisibleError(f"{path}: {error.strerror or error}") from error
        found = xxhash.xxh3_128_hexdigest(data)
        if found != digest:
            raise CorruptError(f"{path}: its digest is {found}, the publisher announced {digest}")
        return Manifest.from_json(data, path)

    return _until_visible(read, directory, visible_secs)


def await_files(directory: Path, manifest: Manifest, visible_secs: float = 0.0) -> None:
    """Waits until every listed file has its size; refuses a longer one at once and the others at the deadline."""

    def check() -> None:
        for name, record in manifest.files.items():
            path = directory / name
            try:
                size = path.stat().st_size
            except OSError as error:
                lost = [tensor for tensor, item in manifest.tensors.items() if item.file == name]
                holds = f" (holds {_some(lost)})" if lost else ""
                raise NotVisibleError(f"{path}: {error.strerror or error}{holds}") from error
            if size < record.bytes:
                raise NotVisibleError(f"{path}: {size} of {record.bytes} bytes")
            if size > record.bytes:
                raise MismatchError(f"{path}: {size} bytes, the manifest says {record.bytes}")

    _until_visible(check, directory, visible_secs)


def _until_visible(attempt: Callable[[], T], directory: Path, visible_secs: float) -> T:
    deadline = time.monotonic() + visible_secs
    while True:
        try:
            return attempt()
        except (NotVisibleError, CorruptError) as error:
            left = deadline - time.monotonic()
            if left <= 0:
                waited = f" after {visible_secs:g} s (weight_sync.visible_secs)" if visible_secs else ""
                raise type(error)(f"{error}{waited}") from error
            time.sleep(min(_POLL_SECS, left))
            # listing makes an NFS client ask the server again instead of trusting that there is no such name
            with contextlib.suppress(OSError):
                list(directory.iterdir())


def verify(directory: Path, manifest: Manifest, mode: VerifyMode = "full") -> None:
    """Raises a WeightsError naming file and tensor, unless the directory is exactly what the manifest says."""
    await_files(directory, manifest)
    refuse_unlisted(directory, manifest)
    for name in manifest.files:
        with (directory / name).open("rb") as file:
            check_file(file, directory / name, manifest, mode)


def refuse_unlisted(directory: Path, manifest: Manifest) -> None:
    """A server loads every weight file of a directory, so one that the manifest does not know is refused."""
    extra = sorted(path.name for path in directory.glob("*.safetensors") if path.name not in manifest.files)
    if extra:
        raise MismatchError(f"{directory}: has {_some(extra)}, which the manifest does not list")


def check_file(
    file: BinaryIO, path: Path, manifest: Manifest, mode: VerifyMode, write: Callable[[bytes], object] | None = None
) -> None:
    """Compares one open file with the manifest, passing what it reads on to `write`: one pass to copy and verify."""
    record = manifest.files[path.name]
    if path.suffix != ".safetensors":
        hashed = _stream(file, record.bytes, path, write, mode == "full")
        if mode == "full" and hashed != record.xxh3:
            raise CorruptError(f"{path}: its content changed (hash {hashed}, the manifest says {record.xxh3})")
        return
    header, entries = read_header(file, path)
    _check_entries(path, entries, manifest)
    if mode == "full" and xxhash.xxh3_128_hexdigest(header) != record.xxh3:
        raise CorruptError(f"{path}: its header changed")
    if write is not None:
        write(header)
    elif mode == "sizes":
        return
    for entry in entries:
        hashed = _stream(file, entry.end - entry.start, path, write, mode == "full")
        expected = manifest.tensors[entry.name].xxh3
        if mode == "full" and hashed != expected:
            raise CorruptError(
                f"{path}: tensor {entry.name}: its bytes changed (hash {hashed}, the manifest says {expected})"
            )


def _check_entries(path: Path, entries: list[Entry], manifest: Manifest) -> None:
    wanted = {name: record for name, record in manifest.tensors.items() if record.file == path.name}
    differences = _differences(
        {name: (record.shape, record.dtype) for name, record in wanted.items()},
        {entry.name: (entry.shape, entry.dtype) for entry in entries},
    )
    if differences:
        raise MismatchError(f"{path}: not what its manifest says: {_some(differences)}")


def _stream(file: BinaryIO, size: int, path: Path, write: Callable[[bytes], object] | None, hashing: bool) -> str:
    state = xxhash.xxh3_128()
    left = size
    while left:
        chunk = file.read(min(CHUNK, left))
        if not chunk:
            raise NotVisibleError(f"{path}: ends {left} bytes early")
        left -= len(chunk)
        if hashing:
            state.update(chunk)
        if write is not None:
            write(chunk)
    return state.hexdigest()


def refuse_other_tensors(have: Manifest, new: Manifest, where: Path) -> None:
    """Refuses a version whose tensors are not the ones that the reader has; hashes may differ, nothing else."""
    differences = _differences(
        {name: (record.shape, record.dtype) for name, record in have.tensors.items()},
        {name: (record.shape, record.dtype) for name, record in new.tensors.items()},
    )
    if differences:
        raise MismatchError(f"{where}: does not fit version {have.version}, which is served: {_some(differences)}")


Kind = tuple[tuple[int, ...], str]


def _differences(have: Mapping[str, Kind], got: Mapping[str, Kind]) -> list[str]:
    found = [f"tensor {name} is missing" for name in sorted(have.keys() - got.keys())]
    found += [f"tensor {name} is extra" for name in sorted(got.keys() - have.keys())]
    for name in sorted(have.keys() & got.keys()):
        (shape, dtype), (new_shape, new_dtype) = have[name], got[name]
        if shape != new_shape:
            found.append(f"tensor {name} has shape {list(new_shape)} instead of {list(shape)}")
        if dtype != new_dtype:
            found.append(f"tensor {name} is {new_dtype} instead of {dtype}")
    return found


def _some(items: list[str], limit: int = 6) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def describe(directory: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor of a checkpoint directory, from headers; refuses a truncated or doubled one."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for name in shard_files(directory):
        path = directory / name
        with path.open("rb") as file:
            _, entries = read_header(file, path)
        for entry in entries:
            if entry.name in found:
                raise WeightsError(f"{path}: tensor {entry.name} is in two files of this checkpoint")
            found[entry.name] = (entry.shape, entry.dtype)
    return found
