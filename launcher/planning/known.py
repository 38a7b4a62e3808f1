"""What planning reads from disk before it judges: the model's sizes, the dataset's rows, what prepare recorded."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pyarrow
import pyarrow.parquet

from core.config import Config
from core.config.dataset import Dataset
from core.data.hub import HubError, resolve
from core.data.rows import RowsError, split_files
from core.telemetry.files import write_atomic
from launcher.model_sizes import ModelShape, checkpoint_problems, local_directory, shape_of
from launcher.planning.problem import Problem

PREPARED = "prepared.json"
TRAIN_FILES = ("train",)
VALID_FILES = ("test", "validation", "valid", "val")


@dataclass(frozen=True)
class Prepared:
    """What prepare saw in the rows of one dataset under one configuration: the largest of each, and quantiles."""

    rows: int
    bad_rows: int
    max_prompt_tokens: int
    max_image_tokens: int
    max_images: int
    quantiles: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Known:
    shape: ModelShape
    train_rows: int | None = None
    prepared: Prepared | None = None


def cache_of(config: Config) -> Path:
    return Path(config.paths.cache).expanduser()


def prepared_key(config: Config, dataset: Dataset) -> str:
    """Names what the lengths depend on: rows, tokenizer, pixel limits, system prompt."""
    kwargs = dataset.dataset_kwargs
    parts: list[object] = [dataset.path, dataset.split, config.tokenizer_path or config.actor.path]
    parts += [kwargs.get(name) for name in ("min_pixels", "max_pixels", "system_prompt", "max_rows")]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def read_prepared(config: Config) -> Prepared | None:
    try:
        record = json.loads((cache_of(config) / PREPARED).read_text())[prepared_key(config, config.train_dataset)]
        return Prepared(**record)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_prepared(config: Config, dataset: Dataset, prepared: Prepared) -> Path:
    path = cache_of(config) / PREPARED
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        records = json.loads(path.read_text())
    except (OSError, ValueError):
        records = {}
    records[prepared_key(config, dataset)] = asdict(prepared)
    write_atomic(path, json.dumps(records, indent=1))
    return path


def dataset_rows(dataset: Dataset, cache: Path, *names: str) -> int | None:
    """Rows of the configured split (else the first of `names`) by the parquet footers; None where there are none."""
    try:
        wanted = (dataset.split,) if dataset.split else names or TRAIN_FILES
        files = split_files(resolve(dataset.path, cache=cache, kind="dataset"), *wanted)
        rows = sum(pyarrow.parquet.read_metadata(each.absolute()).num_rows for each in files)
    except (HubError, RowsError, OSError, pyarrow.ArrowException):
        return None
    return min(rows, dataset.dataset_kwargs.get("max_rows") or rows)


def read_known(config: Config, model: ModelShape | None = None) -> tuple[Known, list[Problem]]:
    """Everything read once; raises ModelError where the model's sizes cannot be had."""
    cache = cache_of(config)
    shape = model or shape_of(config.actor.path, cache)
    directory = local_directory(config.actor.path, cache) if model is None else None
    problems = [Problem("actor.path", text) for text in (checkpoint_problems(directory) if directory else ())]
    rows = dataset_rows(config.train_dataset, cache)
    return Known(shape, rows, read_prepared(config)), problems
