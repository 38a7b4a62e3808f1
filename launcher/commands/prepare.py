"""prepare: model and dataset into paths.cache, every row through the real processing, lengths recorded for plan."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from core.config import Config, UserError, load
from core.data.hub import HubError, Kind, resolve
from core.data.rows import RowsError
from core.data.tokenizer import TokenizerError
from launcher.allocation import AllocationError, parse
from launcher.emulate import emulate
from launcher.model_sizes import checkpoint_problems
from launcher.planning.known import cache_of, write_prepared
from launcher.roles.prepare import QUANTILES, Measured, measure

_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt")
_DATASET_FILES = ("*.parquet", "*.md")
_BAD_ROWS_SHOWN = 50


class PrepareError(UserError):
    """Model or dataset cannot be had; the message says which, and what was tried."""


def run(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, arguments.overrides)
    if arguments.emulate:
        config, swaps = emulate(config)
        for line in swaps:
            print(f"swap: {line}", file=sys.stderr)
    places = bring(config)
    try:
        measured = asyncio.run(measure(config, _backend(config), _Progress().show))
    except (RowsError, HubError, TokenizerError) as error:
        raise PrepareError(str(error)) from error
    record = None
    for each in measured:
        dataset = config.valid_dataset if each.split == "valid" and config.valid_dataset else config.train_dataset
        if each.split in ("train", "valid"):
            record = write_prepared(config, dataset, each.summary())
    if arguments.json:
        shown = {each.split: {**asdict(each.summary()), "bad": each.bad} for each in measured}
        print(json.dumps({"places": places, "splits": shown, "record": str(record)}, indent=1))
    else:
        print(_text(places, measured, record))
    return 1 if any(each.rows == len(each.bad) for each in measured) else 0


def bring(config: Config) -> dict[str, str]:
    """Where model and datasets lie on this machine, downloading what is named by hub id and is not here."""
    wanted: list[tuple[str, str, Kind]] = [("actor.path", config.actor.path, "model")]
    if config.tokenizer_path and config.tokenizer_path != config.actor.path:
        wanted.append(("tokenizer_path", config.tokenizer_path, "model"))
    wanted.append(("train_dataset.path", config.train_dataset.path, "dataset"))
    if config.valid_dataset is not None:
        wanted.append(("valid_dataset.path", config.valid_dataset.path, "dataset"))
    places = {key: _bring_one(key, path, kind, cache_of(config)) for key, path, kind in wanted}
    problems = checkpoint_problems(places["actor.path"])
    if problems:
        raise PrepareError("\n".join(f"actor.path: {problem}" for problem in problems))
    return {key: str(place) for key, place in places.items()}


def _bring_one(key: str, path: str, kind: Kind, cache: Path) -> Path:
    try:
        found = resolve(path, cache=cache, kind=kind)
    except HubError:
        found = None
    # a snapshot without a shard, or without rows, is completed by the download; a directory of the user is only checked
    if found is not None and (Path(path).expanduser().exists() or _is_whole(found, kind)):
        return found
    if path.startswith((".", "~", "/")):
        raise PrepareError(f"{key}: {path} is not there; give a directory that is, or a hub id")
    cache.mkdir(parents=True, exist_ok=True)
    patterns = _MODEL_FILES if kind == "model" else _DATASET_FILES
    print(f"downloading {kind} {path} into {cache}", file=sys.stderr)
    try:
        return Path(snapshot_download(path, repo_type=kind, cache_dir=cache, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise PrepareError(
            f"{key}: {kind} {path!r} is neither on this machine nor could be downloaded: {first}\n"
            "  run prepare where there is internet, or name a local directory"
        ) from error


def _is_whole(snapshot: Path, kind: Kind) -> bool:
    return any(snapshot.rglob("*.parquet")) if kind == "dataset" else not checkpoint_problems(snapshot)


def _backend(config: Config) -> str | None:
    try:
        components = parse(config.allocation_mode).components
    except AllocationError:
        return None
    return next((each.backend for each in components if each.is_inference), None)


class _Progress:
    """One line to a terminal's stderr as rows go by; nothing where nobody looks."""

    def show(self, split: str, done: int, total: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done >= total else ""
            print(f"\r{split}: {done} of {total} rows", end=end, file=sys.stderr, flush=True)


def _text(places: dict[str, str], measured: Sequence[Measured], record: Path | None) -> str:
    lines = [f"{key:<20}{place}" for key, place in places.items()]
    for each in measured:
        lines.append(f"{each.split}: {each.rows} rows, {len(each.bad)} bad")
        lines += [f"  bad row {text}" for text in each.bad[:_BAD_ROWS_SHOWN]]
        if len(each.bad) > _BAD_ROWS_SHOWN:
            lines.append(f"  … and {len(each.bad) - _BAD_ROWS_SHOWN} more; --json lists them all")
        quantiles = each.summary().quantiles
        if quantiles:
            lines.append("  " + " " * 18 + "".join(f"{name:>11}" for name in ("min", "median", "90%", "99%", "max")))
        for name, values in quantiles.items():
            lines.append(f"  {name.replace('_', ' '):<18}" + "".join(f"{value:>11,.0f}" for value in values))
    assert len(QUANTILES) == 5
    if record is not None:
        lines.append(f"recorded in {record}: plan reads it")
    return "\n".join(lines)
