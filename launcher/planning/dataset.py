"""Can the datasets of a configuration be read? The footers, the columns that every row needs, the first rows.

Looks only at what is on this machine, through the reader that the run uses; rows one by one are prepare's business.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from core.config import Config
from core.config.dataset import Dataset
from core.data.hub import HubError, resolve
from core.data.rows import NEEDED_COLUMNS, Rows, RowsError, split_files
from launcher.planning.known import TRAIN_FILES, VALID_FILES, cache_of
from launcher.planning.problem import Problem

ELSEWHERE = "if the node of training rank 0 has it, well and good: this machine cannot tell"
FOR_PREPARE = "a run ends at once without it: `python -m launcher prepare CONFIG` brings it, where there is internet"
Finding = tuple[Problem, bool]
"""And whether it is one for certain: of what only a node or prepare can tell, plan warns."""
FIRST_BYTES = 32 << 20
"""A first row group up to this is decoded; of a larger one the footer must do."""


def dataset_findings(config: Config) -> tuple[list[Problem], list[str]]:
    """Problems and warnings. A hub id that is not on this machine is for prepare to bring."""
    problems: list[Problem] = []
    doubts: dict[str, str] = {}  # by message: two datasets of one path are one doubt
    for found, certain in _findings(config):
        if certain:
            problems.append(found)
        else:
            doubts.setdefault(found.message, str(found))
    return problems, list(doubts.values())


def _findings(config: Config) -> Iterator[Finding]:
    train, valid = config.train_dataset, config.valid_dataset
    yield from _findings_of(config, "train_dataset", train, train.split, TRAIN_FILES)
    gate = train.dataset_kwargs.get("gate")
    if gate:
        yield from _findings_of(config, "train_dataset.dataset_kwargs.gate", train, gate["split"], ())
    if valid is not None:
        yield from _findings_of(config, "valid_dataset", valid, valid.split, VALID_FILES)


def _findings_of(
    config: Config, key: str, dataset: Dataset, split: str | None, names: tuple[str, ...]
) -> Iterator[Finding]:
    at_path = f"{key.split('.')[0]}.path"
    try:
        place = resolve(dataset.path, cache=cache_of(config), kind="dataset")
    except HubError:
        if key == at_path.split(".")[0]:  # else it is said of its dataset already
            yield _missing(config, at_path, dataset.path)
        return
    except OSError as error:  # a directory above it is closed to this user
        yield Problem(at_path, f"{dataset.path} cannot be looked at: {error}"), True
        return
    try:
        files = split_files(place, *((split,) if split else names))
    except RowsError as error:
        other = split and error.present
        yield Problem(f"{key}.split" if other else at_path, str(error)), True
        return
    wrong = _unreadable(files)
    if wrong:
        yield Problem(at_path, wrong), True


def _missing(config: Config, key: str, path: str) -> Finding:
    if not path.startswith((".", "~", "/")):
        return Problem(key, f"{path} is not on this machine; {FOR_PREPARE}"), False
    if config.scheduler.type == "slurm" and path.startswith("/"):
        return Problem(key, f"{path} is not there; {ELSEWHERE}"), False
    return Problem(key, f"{path} is not there; give a directory that is, or a hub id"), True


def _unreadable(files: list[Path]) -> str | None:
    try:
        rows = Rows(files)
        missing = [name for name in NEEDED_COLUMNS if name not in rows.columns]
        if missing:
            there = ", ".join(rows.columns) or "none"
            return f"{files[0]} has no column {' and no column '.join(missing)}, which every row needs; it has {there}"
        if not len(rows):
            return f"{files[0]} has no rows"
        if rows.first_bytes <= FIRST_BYTES:
            rows[0]
    except RowsError as error:
        return str(error)
    return None
