"""Bad rows, bad rewards and bad models: named, counted, and nothing else is lost."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.support.runs import Ended, await_gone, launcher, lines, steps

pytestmark = pytest.mark.timeout(240)
Emulate = Callable[..., tuple[Ended, Path]]


def png(size: tuple[int, int], mode: str = "RGB") -> bytes:
    body = io.BytesIO()
    Image.new(mode, size, 128).save(body, "PNG")
    return body.getvalue()


@pytest.fixture
def spoiled(models: Path, tmp_path: Path) -> Path:
    """The first 32 pictures, six of them spoiled; in the order of the file, without shuffling."""
    table = pq.read_table(models / "pictures" / "train-00000-of-00001.parquet").slice(0, 32)
    rows = table.to_pylist()
    rows[1]["images"] = [{"bytes": b"not an image", "path": None}]
    rows[3]["images"] = [{"bytes": rows[3]["images"][0]["bytes"][:200], "path": None}]
    rows[5]["answer"] = None
    rows[7]["images"] = []
    rows[9]["problem"] = "<image><image>How many red shapes?"
    rows[11]["images"] = [{"bytes": png((1, 400)), "path": None}]
    directory = tmp_path / "spoiled"
    directory.mkdir()
    pq.write_table(table.from_pylist(rows, schema=table.schema), directory / "train-00000-of-00001.parquet")
    shutil.copy(models / "pictures" / "test-00000-of-00001.parquet", directory)
    return directory


def test_bad_rows_are_named_and_the_next_ones_move_up(emulate: Emulate, spoiled: Path) -> None:
    ended, run = emulate(
        "configs/smoke.yaml",
        f"train_dataset.path={spoiled}",
        f"valid_dataset.path={spoiled}",
        "train_dataset.shuffle=false",
    )
    ended.expect()
    assert len(steps(run)) == 3
    void = {record["position"]: record["reason"] for record in lines(run / "void.jsonl")}
    assert sorted(void) == [1, 3, 5, 7, 9, 11], void
    groups = lines(run / "rollouts" / "index.jsonl")
    assert [group["position"] for group in groups] == [0, 2, 4, 6, 8, 10, *range(12, 18)]
    assert sum(count for record in steps(run) for count in record["void"].values()) == 6
    report = launcher("report", str(run), "--json").expect().out
    assert '"void"' in report


def test_data_of_which_nothing_can_be_trained_is_no_run_that_is_done(
    emulate: Emulate, models: Path, tmp_path: Path
) -> None:
    table = pq.read_table(models / "pictures" / "train-00000-of-00001.parquet").slice(0, 12)
    rows = [{**row, "images": [{"bytes": b"broken", "path": None}]} for row in table.to_pylist()]
    pq.write_table(table.from_pylist(rows, schema=table.schema), tmp_path / "train-00000-of-00001.parquet")
    ended, run = emulate("configs/smoke.yaml", f"train_dataset.path={tmp_path}", "valid_dataset=null")
    assert ended.status == 1
    assert "the data ended before the first batch was whole: 12 void (" in ended.err
    assert steps(run) == []
    await_gone(run)


def test_rewards_that_raise_hang_or_return_text_are_counted_by_kind(
    emulate: Emulate, pictures: tuple[str, str]
) -> None:
    ended, run = emulate(
        "configs/smoke.yaml",
        *pictures,
        "reward=tests.e2e.rewards:misbehave",
        "rollout.reward_timeout=1.0",
        "rollout.max_consecutive_failures=1000",
        "valid_dataset=null",
    )
    ended.expect()
    kinds: dict[str, int] = {}
    for record in steps(run):
        for kind, count in record["reward_errors"].items():
            kinds[kind] = kinds.get(kind, 0) + count
    assert kinds.keys() == {"raised", "timeout", "not_a_number"}, kinds
    assert sum(record["samples"] for record in steps(run)) == 48


def test_a_reward_that_never_works_stops_the_run_with_its_traceback(
    emulate: Emulate, pictures: tuple[str, str]
) -> None:
    ended, run = emulate(
        "configs/smoke.yaml", *pictures, "reward=tests.e2e.rewards:always_raises", "rollout.max_consecutive_failures=3"
    )
    assert ended.status == 1
    assert "this reward never works" in ended.err
    await_gone(run)


def test_a_model_without_one_of_its_shards_is_refused_before_anything_starts(
    emulate: Emulate, pictures: tuple[str, str], models: Path, tmp_path: Path
) -> None:
    torn = tmp_path / "torn"
    shutil.copytree(models / "tiny", torn)
    shard = sorted(torn.glob("model-*.safetensors"))[1]
    shard.unlink()
    ended, run = emulate("configs/smoke.yaml", *pictures, f"actor.path={torn}")
    assert ended.status == 2
    assert shard.name in ended.err and "Traceback" not in ended.err
    assert not (run / "logs").exists()


def test_every_error_of_a_config_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(
        "experiment_name: x\ntrial_name: y\nallocation_mode: vllm:d1+d1\ngconfig:\n  n_sample: 4\n  temperature: hot\n"
        "actor:\n  dtype: float12\n"
    )
    ended = launcher("plan", str(path))
    assert ended.status == 2
    for place in (f"{path}:5", f"{path}:6", f"{path}:8"):
        assert place in ended.err, ended.err
    assert "n_samples" in ended.err and "Traceback" not in ended.err
