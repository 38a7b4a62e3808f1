"""Checkpoints to go on from: model, moments and everything that tells where training stands, by torch DCP.

Owns `step-<N>/` below one directory: written under a temporary name, hashed into a manifest, renamed once. A broken one
falls back to the one before it, or stops; that nothing was ever saved is the only reason to start afresh. A save has
two halves: `stage` copies to host memory while training waits, `write` may then run beside training, over a process
group of its own.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from core.engine.train_engine import TrainEngine
from core.parallel.mesh import Mesh
from core.telemetry.files import sync_directory, write_atomic
from core.telemetry.phases import reach

MANIFEST, STATE, LATEST = "manifest.json", "state.json", "latest"
_CHUNK = 8 << 20

Gather = Callable[[object], list[Any]]  # every rank's object, on every rank


class CheckpointError(Exception):
    """A checkpoint cannot be written, or none of those that are there can be read."""


@dataclass(frozen=True)
class Loaded:
    """Where training stood, and what was wrong with newer checkpoints."""

    step: int
    state: dict[str, Any]
    warnings: list[str]


@dataclass(frozen=True)
class Staged:
    """A rank's part of a checkpoint in host memory: nothing that training changes."""

    step: int
    rank: int
    tensors: dict[str, Any]
    state: dict[str, Any]


def save(root: Path, step: int, engine: TrainEngine, state: dict[str, Any], *, keep: int, gather: Gather) -> Path:
    """Writes `root/step-<step>` from all ranks together and keeps the newest `keep`; `state` (JSON) is rank 0's."""
    return write(root, stage(step, engine, state), keep=keep, gather=gather, group=engine.mesh.world)


def stage(step: int, engine: TrainEngine, state: dict[str, Any]) -> Staged:
    """Copies what is to be saved; training may go on as soon as it returns."""
    assert engine.optimizer is not None
    tensors = {"model": dict(engine.parameters), "moments": engine.optimizer.state()}
    copied = DefaultStager(StagingOptions(False, False, False, False)).stage(tensors)
    assert isinstance(copied, dict)
    return Staged(step, engine.mesh.rank, copied, {**state, "step": step, "updates": dict(engine.optimizer.updates)})


def write(root: Path, staged: Staged, *, keep: int, gather: Gather, group: dist.ProcessGroup | None) -> Path:
    """The second half: files, manifest, rename, `latest`. All ranks together, over `group` and the `gather` over it."""
    name, rank = f"step-{staged.step}", staged.rank
    final, staging = root / name, root / f".tmp-{name}"
    _together(gather, lambda: _fresh(root, staging) if rank == 0 else None, final)

    def write_share() -> dict[str, Any]:
        reach("checkpoint-data")
        dcp.save(staged.tensors, checkpoint_id=staging, no_dist=group is None, process_group=group)
        reach("checkpoint-metadata")
        return {path.name: _record(path) for path in sorted(staging.glob(f"__{rank}_*.distcp"))}

    files: dict[str, Any] = {}
    for part in _together(gather, write_share, final):
        files |= part

    def complete() -> None:
        (staging / STATE).write_text(json.dumps(staged.state))
        reach("checkpoint-state")
        for each in (".metadata", STATE):
            files[each] = _record(staging / each)
        write_atomic(staging / MANIFEST, manifest_text(staged.step, files))
        reach("checkpoint-manifest")
        _replace(staging, final)
        reach("checkpoint-renamed")
        _point(root, final.name)
        reach("checkpoint-latest")
        for old in _steps(root)[keep:]:
            shutil.rmtree(root / f"step-{old}", ignore_errors=True)

    _together(gather, lambda: complete() if rank == 0 else None, final)
    return final


def load(root: Path, engine: TrainEngine, *, gather: Gather) -> Loaded | None:
    """Brings the newest whole checkpoint into the engine; None where there never was one."""
    mesh = engine.mesh
    steps = gather(_steps(root) if mesh.rank == 0 else None)[0]
    warnings: list[str] = []
    for step in steps:
        path = root / f"step-{step}"
        reasons = [reason for reason in gather(_fault(path, mesh)) if reason]
        if not reasons:
            return Loaded(step, _load(path, engine), warnings)
        warnings.append(f"checkpoint {path} cannot be used ({reasons[0]}); going back to the one before it")
    if steps:
        raise CheckpointError(
            f"none of the checkpoints in {root} can be used: {'; '.join(warnings)}. "
            "Restore one, or move the directory away to start afresh"
        )
    return None


def load_step(path: Path, engine: TrainEngine) -> dict[str, Any]:
    """One checkpoint, by one process alone; raises CheckpointError where it is not what was written."""
    fault = _fault(path, engine.mesh)
    if fault is not None:
        raise CheckpointError(f"checkpoint {path} cannot be used ({fault})")
    return _load(path, engine)


def _load(path: Path, engine: TrainEngine) -> dict[str, Any]:
    assert engine.optimizer is not None
    tensors = {"model": dict(engine.parameters), "moments": engine.optimizer.state()}
    dcp.load(tensors, checkpoint_id=path, no_dist=engine.mesh.world is None, process_group=engine.mesh.world)
    state = json.loads((path / STATE).read_text())
    engine.optimizer.updates.update(state["updates"])
    return state


def newest(root: Path) -> int | None:
    """Step of the newest checkpoint that has a manifest."""
    return next(iter(_steps(root)), None)


def oldest(root: Path) -> int | None:
    """Step of the oldest checkpoint that is kept."""
    return next(reversed(_steps(root)), None)


def _steps(root: Path) -> list[int]:
    """Steps of the checkpoints that are there, newest first."""
    names = [path.name.removeprefix("step-") for path in root.glob("step-*") if path.is_dir()]
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def _fault(path: Path, mesh: Mesh) -> str | None:
    """What is wrong with a checkpoint. Each rank reads a share of its files."""
    try:
        text = (path / MANIFEST).read_text()
        written = json.loads(text)
        files = written["files"]
        if text != manifest_text(written["step"], files) or path.name != f"step-{written['step']}":
            return f"{MANIFEST} is not what was written"
        for number, name in enumerate(sorted(files)):
            if number % mesh.size == mesh.rank and _record(path / name) != files[name]:
                return f"{name} is not what was written"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def manifest_text(step: int, files: dict[str, Any]) -> str:
    """The manifest, with a hash of itself: a damaged one is told from a good one, too."""
    said = {"step": step, "files": dict(sorted(files.items()))}
    return json.dumps({**said, "xxh3": xxhash.xxh3_128_hexdigest(json.dumps(said).encode())})


def _fresh(root: Path, staging: Path) -> None:
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    for left in root.glob(".tmp-step-*"):
        shutil.rmtree(left, ignore_errors=True)
    staging.mkdir(mode=0o700)


def _replace(staging: Path, final: Path) -> None:
    """A step that is trained again after a restart replaces its earlier self."""
    gone = final.with_name(f".tmp-{final.name}-gone")
    if final.exists():
        final.rename(gone)
    sync_directory(staging)
    staging.rename(final)
    sync_directory(final.parent)
    shutil.rmtree(gone, ignore_errors=True)


def _point(root: Path, name: str) -> None:
    link = root / f".{LATEST}.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.rename(root / LATEST)


def _record(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    size = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return {"bytes": size, "xxh3": digest.hexdigest()}


def _together(gather: Gather, action: Callable[[], Any], final: Path) -> list[Any]:
    """Runs `action` on every rank; when it fails on one, all raise, so that none waits for it."""
    try:
        outcome: tuple[Any, str | None] = (action(), None)
    except (OSError, dist.DistError, dcp.api.CheckpointException) as error:
        outcome = (None, f"{type(error).__name__}: {error}")
    answers = gather(outcome)
    for rank, (_, failure) in enumerate(answers):
        if failure is not None:
            raise CheckpointError(f"{final} could not be written by rank {rank}: {failure}")
    return [answer for answer, _ in answers]
