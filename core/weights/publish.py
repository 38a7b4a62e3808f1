"""A version written by all ranks at once, and seen by readers at once or not at all.

Owns the order of events: temporary directory, one weight file per rank, index and manifest, rename. How tensors are
gathered to ranks is the trainer's affair; who reads the version, the pool's.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from core.telemetry.files import append_line, read_lines, sync_directory
from core.telemetry.phases import reach
from core.weights.errors import DiskFullError, NameTakenError, WeightsError
from core.weights.fetch import FULL
from core.weights.manifest import NAME, FileRecord, Manifest, TensorRecord
from core.weights.shards import INDEX, header_bytes
from core.weights.tensors import DTYPES
from core.weights.versions import STAGING

JOURNAL = "published.jsonl"
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".md", ".msgpack", ".h5")
_MAX_AUX_BYTES = 256 << 20
_PART_BYTES = 512 << 20  # hashed, written and later fetched by a thread of its own
_MOST_PARTS = 8


@dataclass(frozen=True)
class Share:
    """What one rank wrote; `failure` and nothing else where it could not."""

    tensors: dict[str, TensorRecord]
    files: dict[str, FileRecord]
    failure: tuple[str, bool] | None = None


def publish(
    weights_dir: Path,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    aux_dir: Path,
    *,
    rank: int,
    world: int,
    gather: Callable[[object], list],
    barrier: Callable[[], None],
    version: int,
    generation: int,
    lineage: Sequence[tuple[int, int]],
) -> Manifest:
    """Writes `weights_dir/name` from every rank's own whole tensors (hub names); its manifest on every rank.

    Collective: every rank calls it, with disjoint tensors; a rank may have none. `gather` returns all ranks' objects on
    every rank. `aux_dir` gives config, tokenizer and processor files. If any rank fails, all raise, and nothing stays.
    The same tensors give the same bytes of weight files.
    """
    staging = weights_dir / f"{STAGING}{name}"
    opened = _guarded(lambda: _open(weights_dir, name, staging), staging) if rank == 0 else None
    _raise_failure(gather(opened.failure if opened else None), staging, rank, barrier)

    def write() -> Share:
        staging.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _write_share(staging, f"model-{rank + 1:05d}-of-{world:05d}", tensors)

    shares: list[Share] = gather(_guarded(write, staging))
    _raise_failure([share.failure for share in shares], staging, rank, barrier)

    manifest: Manifest | None = None

    def complete() -> Share:
        nonlocal manifest
        merged = _merge(shares, staging)
        files = dict(merged.files)
        dtypes = {record.dtype for record in merged.tensors.values()}
        files |= _write_aux(staging, aux_dir, dtypes)
        files |= _write_file(staging / INDEX, _index(merged.tensors))
        manifest = Manifest(version, generation, tuple((v, g) for v, g in lineage), merged.tensors, files)
        _write_file(staging / NAME, manifest.to_json())
        sync_directory(staging)
        append_line(weights_dir / JOURNAL, {"name": name, "digest": manifest.digest, "bytes": manifest.weight_bytes})
        reach("publish-before-rename")
        os.rename(staging, weights_dir / name)  # noqa: PTH104  fails where the name exists, and shall
        reach("publish-after-rename")
        sync_directory(weights_dir)
        return Share({}, {})

    completed = _guarded(complete, staging) if rank == 0 else Share({}, {})
    answers = gather((completed.failure, manifest))
    _raise_failure([failure for failure, _ in answers], staging, rank, barrier)
    result = answers[0][1]
    assert isinstance(result, Manifest)
    return result


def _open(weights_dir: Path, name: str, staging: Path) -> Share:
    if not name or Path(name).name != name or name.startswith("."):
        raise WeightsError(f"{name!r} cannot name a version")
    weights_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    if (weights_dir / name).exists() or any(row.get("name") == name for row in read_lines(weights_dir / JOURNAL)):
        raise NameTakenError(
            f"{weights_dir / name}: this name was published before; a restart publishes under its own generation"
        )
    for left in weights_dir.glob(f"{STAGING}*"):  # of a trainer that died: only one publishes at a time
        shutil.rmtree(left, ignore_errors=True)
    staging.mkdir(mode=0o700)
    return Share({}, {})


def _guarded(action: Callable[[], Share], staging: Path) -> Share:
    """An error becomes a value that all ranks hear of, so that none waits for one that has given up."""
    try:
        return action()
    except WeightsError as error:
        return Share({}, {}, (f"{type(error).__name__}:{error}", False))
    except OSError as error:
        where = error.filename or staging
        return Share({}, {}, (f"{where}: {error.strerror or error}", error.errno in FULL))


def _raise_failure(
    failures: Sequence[tuple[str, bool] | None], staging: Path, rank: int, barrier: Callable[[], None]
) -> None:
    found = next(((index, failure) for index, failure in enumerate(failures) if failure is not None), None)
    if found is None:
        return
    if rank == 0:
        shutil.rmtree(staging, ignore_errors=True)
    barrier()
    failed_rank, (message, full) = found
    kind, _, text = message.partition(":")
    if kind == NameTakenError.__name__:
        raise NameTakenError(text)
    if kind == WeightsError.__name__:
        raise WeightsError(f"rank {failed_rank} could not publish: {text}")
    if full:
        raise DiskFullError(
            f"rank {failed_rank} could not publish: the disk is full ({message}); "
            "free space, raise the quota, or lower weight_sync.keep. Nothing of this version was left behind"
        )
    raise WeightsError(f"rank {failed_rank} could not publish: {message}")


def _write_share(staging: Path, stem: str, tensors: Mapping[str, torch.Tensor]) -> Share:
    """One file, or several at once where there is much: `stem`, `stem`-2, …."""
    unknown = [name for name in sorted(tensors) if tensors[name].dtype not in DTYPES]
    if unknown:
        raise WeightsError(f"tensor {unknown[0]}: dtype {tensors[unknown[0]].dtype} cannot be published")
    parts = _parts(tensors)
    if not parts:
        return Share({}, {})
    paths = [staging / f"{stem}{f'-{number}' if number > 1 else ''}.safetensors" for number in range(1, len(parts) + 1)]
    if len(parts) == 1:
        return _write_part(paths[0], parts[0])
    with ThreadPoolExecutor(len(parts), thread_name_prefix="publish") as pool:
        return _merge(list(pool.map(_write_part, paths, parts)), staging)


def _parts(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Tensors in the order of their names, cut where the middle of one passes a share of the bytes."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    count = min(_MOST_PARTS, max(1, total // _PART_BYTES))
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    done = 0
    for name in sorted(tensors):
        size = tensors[name].nbytes
        parts[min(count - 1, (2 * done + size) * count // max(1, 2 * total))][name] = tensors[name]
        done += size
    return [part for part in parts if part]


def _write_part(path: Path, tensors: Mapping[str, torch.Tensor]) -> Share:
    names = sorted(tensors)
    header, entries = header_bytes((name, DTYPES[tensors[name].dtype], tuple(tensors[name].shape)) for name in names)
    records: dict[str, TensorRecord] = {}
    with path.open("xb") as file:
        file.write(header)
        for entry in entries:
            whole = tensors[entry.name].detach().cpu().contiguous().reshape(-1)
            data = whole.view(torch.uint8).numpy().data
            file.write(data)
            size = entry.end - entry.start
            records[entry.name] = TensorRecord(
                entry.shape, entry.dtype, size, xxhash.xxh3_128_hexdigest(data), path.name
            )
        file.flush()
        os.fsync(file.fileno())
    size = len(header) + (entries[-1].end if entries else 0)
    return Share(records, {path.name: FileRecord(size, xxhash.xxh3_128_hexdigest(header))})


def _merge(shares: Sequence[Share], staging: Path) -> Share:
    tensors: dict[str, TensorRecord] = {}
    files: dict[str, FileRecord] = {}
    for share in shares:
        for name in share.tensors.keys() & tensors.keys():
            raise WeightsError(f"{staging}: tensor {name} was written by two ranks")
        tensors |= share.tensors
        files |= share.files
    if not tensors:
        raise WeightsError(f"{staging}: no rank had a tensor to publish")
    return Share(tensors, files)


def _write_file(path: Path, data: bytes) -> dict[str, FileRecord]:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {path.name: FileRecord(len(data), xxhash.xxh3_128_hexdigest(data))}


def _index(tensors: Mapping[str, TensorRecord]) -> bytes:
    total = sum(record.bytes for record in tensors.values())
    weight_map = {name: tensors[name].file for name in sorted(tensors)}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode()


def _write_aux(staging: Path, aux_dir: Path, dtypes: set[str]) -> dict[str, FileRecord]:
    """Copies config, tokenizer and processor files; config.json gets the dtype that was really written."""
    files: dict[str, FileRecord] = {}
    for path in sorted(aux_dir.iterdir()):
        skipped = path.name in {INDEX, NAME} or path.name.startswith(".") or path.suffix in _NOT_COPIED
        if skipped or not path.is_file() or path.stat().st_size > _MAX_AUX_BYTES:
            continue
        data = path.read_bytes()
        if path.name == "config.json":
            data = _with_dtype(data, dtypes)
        files |= _write_file(staging / path.name, data)
    return files


def _with_dtype(config: bytes, dtypes: set[str]) -> bytes:
    floats = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    written = {floats[dtype] for dtype in dtypes if dtype in floats}
    tree = json.loads(config)
    keys = [key for key in ("torch_dtype", "dtype") if key in tree]
    if len(written) != 1 or not keys or all(tree[key] in written for key in keys):
        return config
    for key in keys:
        tree[key] = next(iter(written))
    return json.dumps(tree, indent=2).encode()
