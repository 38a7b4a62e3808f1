"""What a run reads at its start and a resume would read again: datasets and the reward function, looked at by plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.config import Config
from launcher.plan import PlanError, plan
from launcher.planning import dataset, reward
from tests.support.rows import stand_in_rows

Recipe = Callable[..., Config]


def problems(config: Config, directory: Path | None = None) -> list[str]:
    try:
        plan(config, user_code=directory)
    except PlanError as error:
        return [str(each) for each in error.problems]
    return []


def test_datasets_that_no_run_could_read(recipe: Recipe, tmp_path: Path) -> None:
    good, empty = stand_in_rows(tmp_path / "good"), tmp_path / "empty"
    empty.mkdir()
    torn = tmp_path / "torn.parquet"
    torn.write_bytes((good / "train-00000-of-00001.parquet").read_bytes()[:-20])
    spoiled = tmp_path / "spoiled.parquet"  # the footer is whole, the rows are not
    pq.write_table(pa.table({"problem": ["?"] * 99, "answer": ["1"] * 99}), spoiled, compression="zstd")
    data = bytearray(spoiled.read_bytes())
    data[4:60] = bytes(56)
    spoiled.write_bytes(data)
    pq.write_table(pa.table({"question": ["?"], "answer": ["1"]}), tmp_path / "columns.parquet")
    pq.write_table(
        pa.table({"problem": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), tmp_path / "0"
    )
    for path, words in (
        (empty, f"train_dataset.path: {empty} has no train-*.parquet; it has no parquet file at all"),
        (torn, f"train_dataset.path: {torn} is not readable parquet"),
        (spoiled, f"train_dataset.path: {spoiled}: row group 0 cannot be read"),
        (tmp_path / "columns.parquet", "columns.parquet has no column problem, which every row needs; it has question"),
        (tmp_path / "0", "0 has no rows"),
    ):
        said = problems(recipe(f"train_dataset.path={path}", f"valid_dataset.path={good}"))
        assert len(said) >= 1 and words in said[-1], (path, said)
    both = (f"train_dataset.path={good}", f"valid_dataset.path={good}")
    assert problems(recipe(*both)) == []
    assert problems(recipe(*both, "valid_dataset.split=nosuch")) == [
        f"valid_dataset.split: {good} has no nosuch-*.parquet; it has "
        "dev-00000-of-00001.parquet, test-00000-of-00001.parquet, train-00000-of-00001.parquet"
    ]


def test_a_dataset_of_the_hub_that_is_not_here_is_for_prepare(recipe: Recipe) -> None:
    config = recipe("train_dataset.path=org/name", "valid_dataset.path=org/name")
    assert problems(config) == []
    (line,) = (each for each in plan(config).warnings if "dataset.path" in each)
    assert line.startswith("train_dataset.path: org/name is not on this machine;") and "launcher prepare" in line


def test_a_dataset_that_only_a_node_has_is_a_warning(recipe: Recipe, tmp_path: Path) -> None:
    good = f"valid_dataset.path={stand_in_rows(tmp_path / 'good')}"
    (line,) = problems(recipe("train_dataset.path=/nvme/rows", good))
    assert line == "train_dataset.path: /nvme/rows is not there; give a directory that is, or a hub id"
    planned = plan(recipe("train_dataset.path=/nvme/rows", good, "scheduler.type=slurm"))
    (line,) = (each for each in planned.warnings if "dataset.path" in each)
    assert line.startswith("train_dataset.path: /nvme/rows is not there; if the node of training rank 0 has it")
    for path in ("./rows", "~nobody-of-this-name/rows"):
        (line,) = problems(recipe(f"train_dataset.path={path}", good, "scheduler.type=slurm"))
        assert line.startswith(f"train_dataset.path: {path} is not there; give")


def test_a_dataset_below_a_closed_directory_is_named(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: str, **words: object) -> Path:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(dataset, "resolve", closed)
    (line, _) = problems(recipe("train_dataset.path=/closed/rows"))
    assert line == "train_dataset.path: /closed/rows cannot be looked at: [Errno 13] Permission denied: '/closed/rows'"


def test_rewards_that_no_run_could_load(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(*args, **row):\n    return 1.0\n\nvalue = 3\n")
    (tmp_path / "broken.py").write_text("import json\n\n\ndef score(:\n")
    (tmp_path / "raising.py").write_text("import json\n\njson.loads('')\n")
    (tmp_path / "ending.py").write_text("import os\n\nos._exit(3)\n")
    for name, words in (
        (
            "nowhere:score",
            "nowhere:score cannot be loaded: ModuleNotFoundError: No module named 'nowhere'; it is looked",
        ),
        ("mine:scor", "AttributeError: module 'mine' has no attribute 'scor'"),
        ("mine:value", "TypeError: mine:value is a int, not a function"),
        ("broken:score", f"SyntaxError: invalid syntax (broken.py, line 4) ({tmp_path / 'broken.py'}:4)"),
        ("raising:score", "JSONDecodeError: Expecting value"),
        ("ending:score", "its process ended while importing it"),
        (f"{tmp_path}/gone.py:score", "FileNotFoundError"),
    ):
        said = problems(recipe(f"reward={name}"), tmp_path)
        assert len(said) == 1 and words in said[0] and said[0].startswith("reward: "), said
        assert f"looked for in {tmp_path} first" in said[0]
        assert problems(recipe(f"reward={name}", "allocation_mode=vllm:d4"), tmp_path) == []  # serving grades nothing
    for name in ("mine:score", f"{tmp_path}/mine.py:score", "exact_match"):
        assert problems(recipe(f"reward={name}"), tmp_path) == []


def test_a_reward_that_may_be_elsewhere_is_a_warning(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = recipe("reward=nowhere:score", "scheduler.type=slurm")
    assert len(problems(slurm)) == 1
    own = recipe("reward=nowhere:score", "scheduler.type=slurm", "slurm.setup=[conda activate theirs]")
    assert any("an environment of their own" in line for line in plan(own).warnings)
    (tmp_path / "there.py").write_text("import os\n\nos.environ['ONLY_ON_NODES']\n\ndef score(*args): ...\n")
    (line,) = problems(recipe("reward=there:score"), tmp_path)
    assert "KeyError: 'ONLY_ON_NODES'" in line
    warned = plan(recipe("reward=there:score", "scheduler.type=slurm"), user_code=tmp_path).warnings
    assert any("'ONLY_ON_NODES'" in line and "of the training component this may differ" in line for line in warned)
    (tmp_path / "slow.py").write_text("import time\n\ntime.sleep(60)\n")
    monkeypatch.setattr(reward, "IMPORT_SECS", 0.5)
    warned = plan(recipe("reward=slow:score"), user_code=tmp_path).warnings
    assert any("was not imported within 0.5 s" in line for line in warned)
