"""--emulate: what is swapped, that every swap is said, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.config import Config, load_text
from launcher.emulate import emulate
from launcher.plan import PlanError, plan, settle
from launcher.planning.change import get_value

Recipe = Callable[..., Config]


def flat(config: Config) -> dict[str, object]:
    def walk(value: object, prefix: str) -> dict[str, object]:
        if not isinstance(value, dict):
            return {prefix: value}
        return {
            key: leaf for name, item in value.items() for key, leaf in walk(item, f"{prefix}.{name}".strip(".")).items()
        }

    return walk(config.model_dump(mode="json"), "")


def test_every_change_is_a_line_and_every_line_a_change(recipe: Recipe) -> None:
    config = recipe()
    swapped, lines = emulate(config)
    before, after = flat(config), flat(swapped)
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {line.split(":")[0] for line in lines}
    assert {"actor.path", "allocation_mode", "actor.dtype", "tokenizer_path"} <= changed
    assert swapped.allocation_mode == "embedded:d2+archon:d2"
    assert any(line.startswith("actor.dtype: bfloat16 → float32") for line in lines)


def test_the_swapped_configuration_reads_back_equal_and_is_planned(recipe: Recipe) -> None:
    settled, planned = settle(recipe(), emulated=True)
    assert load_text(settled.dump_yaml(), "config.yaml", []) == settled
    assert planned.device == "cpu" and planned.emulate and planned.swaps
    assert not planned.not_built
    assert Path(settled.actor.path).is_absolute() and Path(settled.actor.path, "config.json").is_file()


def test_it_is_made_once_and_swapping_twice_changes_nothing(recipe: Recipe) -> None:
    swapped, _ = emulate(recipe())
    written = Path(swapped.actor.path, "config.json").stat().st_mtime_ns
    again, lines = emulate(swapped)
    assert again == swapped and lines == []
    assert emulate(recipe())[0].actor.path == swapped.actor.path
    assert Path(swapped.actor.path, "config.json").stat().st_mtime_ns == written
    assert [path.name for path in Path(swapped.actor.path).parent.iterdir() if path.name.startswith(".")] == []


def test_a_small_local_model_stays(recipe: Recipe, tiny: Path) -> None:
    swapped, lines = emulate(recipe(f"actor.path={tiny}"))
    assert swapped.actor.path == str(tiny)
    assert not any(line.startswith("actor.path") for line in lines)


def test_a_local_path_that_is_not_there_is_not_swapped_away(recipe: Recipe) -> None:
    with pytest.raises(PlanError, match=r"make-model \./no/such"):
        emulate(recipe("actor.path=./no/such"))


@pytest.mark.parametrize(
    ("layout", "small"),
    [
        ("sglang:d4t2+d1", "embedded:d2+archon:d1"),
        ("embedded:d1+archon:d2", None),
        ("embedded:d1+archon:d2t2", None),
        ("embedded:d1+archon:d1c2t2", None),
        ("vllm:d1|d1", "embedded:d1+archon:d1"),
        ("vllm:d4+d4t2c2p2", "embedded:d2+archon:d2"),
    ],
)
def test_at_most_two_of_each_side(recipe: Recipe, layout: str, small: str | None) -> None:
    swapped, _ = emulate(recipe(f"allocation_mode={layout}"))
    assert swapped.allocation_mode == (small or layout)


def test_an_odd_batch_gets_one_rank(recipe: Recipe) -> None:
    swapped, _ = emulate(recipe("train_dataset.batch_size=5", "gconfig.n_samples=3"))
    assert swapped.allocation_mode == "embedded:d2+archon:d1"
    plan(swapped, emulate=True)


def test_an_unreadable_layout_is_left_for_plan_to_refuse(recipe: Recipe) -> None:
    swapped, _ = emulate(recipe("allocation_mode=vllm:d0+d4"))
    with pytest.raises(PlanError, match="at least 1"):
        plan(swapped, emulate=True)


def test_batches_shrink_to_the_rows_there_are(recipe: Recipe, tmp_path: Path) -> None:
    pq.write_table(pa.table({"problem": ["a"] * 7, "answer": ["b"] * 7}), tmp_path / "train-00000-of-00001.parquet")
    pq.write_table(pa.table({"problem": ["a"] * 3, "answer": ["b"] * 3}), tmp_path / "test-00000-of-00001.parquet")
    swapped, lines = emulate(recipe(f"train_dataset.path={tmp_path}", f"valid_dataset.path={tmp_path}"))
    for key, rows in (
        ("train_dataset.batch_size", 7),
        ("valid_dataset.batch_size", 3),
        ("rollout.consumer_batch_size", 7),
    ):
        assert get_value(swapped, key) == rows
        assert any(line.startswith(f"{key}: 32 → {rows}") for line in lines)
    assert plan(swapped, emulate=True).batch.samples == 28


def test_a_slurm_file_runs_on_a_laptop(recipe: Recipe) -> None:
    settled, _ = settle(recipe("scheduler.type=slurm"), emulated=True)
    assert settled.scheduler.type == "local"
