"""--emulate: the same file on a machine without GPUs. Every swap is a line; nothing else is changed.

Owns what is swapped and the tiny checkpoint in paths.cache; the run directory holds the configuration after the swaps,
so that no process needs to know of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from core.config import Config
from launcher.allocation import Allocation, AllocationError, Component, Dims, parse
from launcher.model_sizes import ModelError, local_directory, read_shape
from launcher.planning.batch import samples_of
from launcher.planning.change import get_value, with_value
from launcher.planning.known import TRAIN_FILES, VALID_FILES, cache_of, dataset_rows
from launcher.planning.problem import PlanError, Problem
from launcher.roles.tiny.checkpoint import TinyModel, write_checkpoint

MOST_PARAMS = 50_000_000
MOST_D = 2
FOLLOW_MODEL = ("tokenizer_path", "rollout.tokenizer_path", "ref.path", "sglang.model_path", "vllm.model")


def emulate(config: Config, *, on_cluster: bool = False) -> tuple[Config, list[str]]:
    """The configuration for this machine's cores, and one line for each swap.

    Writes the tiny checkpoint where the model is not a small one. Raises PlanError for a model path that should be on
    this machine and is not. `on_cluster`: the scheduler stays as it is.
    """
    swaps = _Swaps(config)
    _swap_model(swaps)
    _swap_batches(swaps)
    _swap_allocation(swaps)
    for key in ("actor.dtype", "ref.dtype", "embedded.dtype"):
        if get_value(swaps.config, key) in ("bfloat16", "float16"):
            swaps.set(key, "float32")
    if swaps.config.scheduler.type in ("slurm", "ray") and not on_cluster:
        swaps.set("scheduler.type", "local")
    return swaps.config, swaps.lines


class _Swaps:
    def __init__(self, config: Config) -> None:
        self.config = config
        self.lines: list[str] = []

    def set(self, key: str, value: Any, why: str = "") -> None:
        before = get_value(self.config, key)
        if before == value:
            return
        self.config = with_value(self.config, key, value)
        self.lines.append(f"{key}: {before} → {value}{f' ({why})' if why else ''}")


def _swap_allocation(swaps: _Swaps) -> None:
    """embedded servers and archon ranks, at most d2 a side; what cannot be read stays, for plan to refuse.

    The t and c of ranks beside embedded servers stay as well.
    """
    try:
        components = parse(swaps.config.allocation_mode).components
    except AllocationError:
        return
    server = next((each for each in components if each.is_inference), None)
    trainer = next((each for each in components if not each.is_inference), None)
    groups = []
    if server is not None:
        backend = "embedded" if swaps.config.embedded.stands_in else server.backend
        groups.append((Component(backend, Dims(d=min(MOST_D, server.dims.d))),))
    if trainer is not None:
        d = _ranks(swaps.config, trainer.dims.d)
        # who writes `embedded` wrote for a machine like this one: what he cuts and how is what he wants to see
        cut = trainer.dims if server is not None and server.backend == "embedded" else Dims()
        groups.append((Component("archon", Dims(d=d, t=cut.t, c=cut.c)),))
    small = Allocation(tuple(groups))
    if small.components != components:
        swaps.set("allocation_mode", str(small))
    if trainer is not None and swaps.config.actor.archon.dp_replicate > 1:
        swaps.set("actor.archon.dp_replicate", 1)


def _ranks(config: Config, wanted: int) -> int:
    minibatches = config.actor.ppo_n_minibatches if config.type == "rl" else 1
    both = samples_of(config) % (minibatches * MOST_D) == 0
    return min(wanted, MOST_D if both else 1)


def _swap_model(swaps: _Swaps) -> None:
    config = swaps.config
    path = config.actor.path
    directory = local_directory(path, cache_of(config))
    if directory is None and path.startswith((".", "~", "/")):
        raise PlanError(
            [
                Problem(
                    "actor.path",
                    f"{path} is not there: a run or `python -m launcher make-model {path}` writes it "
                    "(--emulate makes a model of its own only for a hub id or a large checkpoint)",
                )
            ]
        )
    if directory is not None and _is_small(directory):
        return
    tiny = str(tiny_checkpoint(cache_of(config)))
    swaps.set("actor.path", tiny, "a tiny random checkpoint")
    for key in FOLLOW_MODEL:
        if get_value(swaps.config, key):
            swaps.set(key, tiny)


def _is_small(directory: Path) -> bool:
    # what cannot be read is left for plan to name
    try:
        return read_shape(directory).params <= MOST_PARAMS
    except ModelError:
        return True


def tiny_checkpoint(cache: Path) -> Path:
    """The tiny checkpoint in the cache, made once; its name changes with its sizes."""
    model = TinyModel()
    target = cache.absolute() / f"tiny-{model.hidden}x{model.layers}-vocab{model.vocab}-seed{model.seed}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        write_checkpoint(scratch, model)
        # another launcher may have been first: its directory is the same
        with contextlib.suppress(OSError):
            os.rename(scratch, target)  # noqa: PTH104 (Path.rename would be the same call)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _swap_batches(swaps: _Swaps) -> None:
    """No batch larger than the rows that are here; consumer_batch_size follows."""
    cache = cache_of(swaps.config)
    for name, files in (("train_dataset", TRAIN_FILES), ("valid_dataset", VALID_FILES)):
        dataset = getattr(swaps.config, name)
        rows = dataset_rows(dataset, cache, *files) if dataset is not None else None
        if not rows or dataset.batch_size <= rows:
            continue
        follows = name == "train_dataset" and swaps.config.rollout.consumer_batch_size == dataset.batch_size
        swaps.set(f"{name}.batch_size", rows, f"the rows of {dataset.path}")
        if follows:
            swaps.set("rollout.consumer_batch_size", rows)
