"""prepare: files into the cache, every row processed, bad rows named, lengths recorded for plan."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from core.config import Config
from launcher.plan import plan
from tests.plan.conftest import ROOT
from tests.plan.hub_server import hub

CPU = "configs/geometry3k_cpu.yaml"


def launch(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", **environment}
    return subprocess.run(
        [sys.executable, "-P", "-m", "launcher", *words],
        cwd=ROOT,
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def png(height: int, width: int) -> bytes:
    body = io.BytesIO()
    noise = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(noise).save(body, "PNG")
    return body.getvalue()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Four good rows (56×56, 56×112, 112×112 and two of 56×56) and five bad ones."""
    directory = tmp_path / "rows"
    directory.mkdir()
    small, broken = png(56, 56), png(56, 56)[:100]
    images = [[small], [png(56, 112)], [png(112, 112)], [small, small], [b"no image"], [], [small], [small], [broken]]
    problems = ["<image>What?"] * 3 + ["<image><image>What?"] + ["<image>What?"] * 3 + ["<image><image>", "<image>"]
    answers = ["1"] * 6 + [None] + ["1"] * 2
    stored = [[{"bytes": each, "path": None} for each in row] for row in images]
    table = pa.table({"images": stored, "problem": problems, "answer": answers})
    pq.write_table(table, directory / "train-00000-of-00001.parquet")
    pq.write_table(table.slice(0, 2), directory / "test-00000-of-00001.parquet")
    return directory


def test_every_row_is_processed_and_the_bad_ones_are_named(rows: Path, tiny: Path, tmp_path: Path) -> None:
    done = launch(
        "prepare", CPU, f"train_dataset.path={rows}", f"actor.path={tiny}", f"paths.cache={tmp_path / 'c'}", "--json"
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    train = said["splits"]["train"]
    assert (train["rows"], train["bad_rows"]) == (9, 5)
    named = sorted(text.split(": ")[0] for text in train["bad"])
    assert named == [f"train-00000-of-00001.parquet:{row}" for row in (4, 5, 6, 7, 8)]
    assert "Traceback" not in done.stderr
    # tokens = height × width / 28²; quantiles of 4, 8, 16, 4, 4
    assert train["quantiles"]["image_tokens"][0::4] == [4, 16] and train["quantiles"]["image_tokens"][1] == 4
    assert train["quantiles"]["pixels"][0::4] == [56 * 56, 112 * 112]
    assert (train["max_images"], train["max_image_tokens"]) == (2, 16)
    assert said["splits"]["valid"]["rows"] == 2


def test_what_it_measured_is_what_plan_uses(rows: Path, tiny: Path, tmp_path: Path) -> None:
    words = [CPU, f"train_dataset.path={rows}", f"actor.path={tiny}", f"paths.cache={tmp_path / 'c'}", "--json"]
    words += ["allocation_mode=embedded:d1+d1", "actor.mb_spec.max_tokens_per_mb=200"]
    before = json.loads(launch("plan", *words, "actor.mb_spec.max_tokens_per_mb=4096").stdout)
    assert any("run prepare" in line for line in before["warnings"])
    guessed = launch("plan", *words)
    assert guessed.returncode == 2 and "gives 256 tokens" in guessed.stderr  # 200704 pixels / 28²
    longest = json.loads(launch("prepare", *words).stdout)["splits"]["train"]["max_prompt_tokens"]
    after = json.loads(launch("plan", *words).stdout)
    assert not any("run prepare" in line for line in after["warnings"])
    assert any("5 bad rows of 9" in line for line in after["warnings"])
    # 4 groups × 4 samples on one rank, each of the longest prompt + 16 new tokens, in micro-batches of 200
    assert after["batch"]["micro_batches_per_rank"] == -(-16 // (200 // (longest + 16)))


def test_what_plan_advises_under_emulate_can_be_typed(rows: Path, tmp_path: Path) -> None:
    """The model is a hub id that is not here: both take the tiny one in its place."""
    words = [
        "--emulate",
        CPU,
        f"train_dataset.path={rows}",
        f"paths.cache={tmp_path / 'c'}",
        "train_dataset.batch_size=4",
    ]
    words += ["actor.path=some/model", "valid_dataset=null"]
    assert "run prepare --emulate to measure them" in launch("plan", *words).stdout
    done = launch("prepare", *words)
    assert done.returncode == 0 and "swap: actor.path: some/model → " in done.stderr, done.stderr
    planned = launch("plan", *words)
    assert planned.returncode == 0 and "5 bad rows of 9" in planned.stdout and "to measure" not in planned.stdout


def test_model_and_dataset_are_downloaded_into_the_cache(rows: Path, tiny: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    words = ["prepare", CPU, "train_dataset.path=some/rows", "actor.path=some/model", f"paths.cache={cache}"]
    begun = cache / "datasets--some--rows" / "snapshots" / "0123"  # by another program, which took the card alone
    begun.mkdir(parents=True)
    (begun / "README.md").touch()
    with hub({"models/some/model": tiny, "datasets/some/rows": rows}) as (endpoint, asked):
        done = launch(*words, HF_HUB_OFFLINE="0", HF_ENDPOINT=endpoint, HF_HOME=str(tmp_path / "home"))
        assert done.returncode == 0, done.stderr
        assert "train: 9 rows, 5 bad" in done.stdout
        count = len(asked)
        assert count > 0
        assert launch(*words, HF_HUB_OFFLINE="0", HF_ENDPOINT=endpoint).returncode == 0
        assert len(asked) == count, "a second prepare asks the hub for nothing"
    planned = launch("plan", *words[1:], "--json")
    assert planned.returncode == 0, planned.stderr
    source = json.loads(planned.stdout)["model"]["source"]
    assert source.startswith(str(cache)) and json.loads(planned.stdout)["batch"]["steps"] == 2


def test_without_internet_it_says_what_is_missing(rows: Path, tmp_path: Path) -> None:
    done = launch(
        "prepare", CPU, f"train_dataset.path={rows}", "actor.path=some/model", f"paths.cache={tmp_path / 'c'}"
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "actor.path: model 'some/model' is neither on this machine nor could be downloaded" in done.stderr
    done = launch(
        "prepare", CPU, "train_dataset.path=./no/rows", "actor.path=./no/model", f"paths.cache={tmp_path / 'c'}"
    )
    assert done.returncode == 2 and "actor.path: ./no/model is not there" in done.stderr


def test_a_checkpoint_without_a_shard_is_refused(rows: Path, tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in tiny.iterdir():
        if not path.name.startswith("model-00002"):
            (broken / path.name).write_bytes(path.read_bytes())
    done = launch("prepare", CPU, f"train_dataset.path={rows}", f"actor.path={broken}", f"paths.cache={tmp_path / 'c'}")
    assert done.returncode == 2 and "this shard is missing" in done.stderr


@pytest.mark.geometry3k
def test_the_real_rows_are_all_good(
    geometry3k_sample: Path, tiny: Path, tmp_path: Path, recipe: Callable[..., Config]
) -> None:
    cache = tmp_path / "cache"
    overrides = [
        f"train_dataset.path={geometry3k_sample}",
        f"valid_dataset.path={geometry3k_sample}",
        f"actor.path={tiny}",
    ]
    done = launch("prepare", "configs/qwen2_5_vl_3b_geometry3k_grpo.yaml", *overrides, f"paths.cache={cache}", "--json")
    assert done.returncode == 0, done.stderr
    splits = json.loads(done.stdout)["splits"]
    assert all(each["bad_rows"] == 0 for each in splits.values())
    assert splits["train"]["rows"] + splits["valid"]["rows"] == 10
    changed = recipe(*overrides, "train_dataset.batch_size=4", "allocation_mode=embedded:d1+d2")
    assert plan(changed, device="cpu").batch.steps == 3
