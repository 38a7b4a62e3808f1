"""Runs in pieces: any split gives the same end, changes that may be made take effect, others are refused by name."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.chaos.broken_runs import Place, call, differences, outcome, start, still
from tests.support.runs import launcher, lines, log_tails, steps

pytestmark = pytest.mark.timeout(600)
TOTAL = 6
EPOCH = ["train_dataset.dataset_kwargs.max_rows=12", "total_train_epochs=2"]  # three batches an epoch
ONE_LAYOUT = ["deterministic=true", "rollout.max_head_offpolicyness=0", "allocation_mode=embedded:d1+archon:d1"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    launcher("make-model", str(root / "tiny"), "--pictures", str(root / "pictures")).expect()
    return root


def end_of(run: Path) -> dict:
    found = outcome(run, TOTAL)
    return {**found, "metrics": [still(record) for record in steps(run)]}


def in_pieces(place: Place, ends: list[int]) -> Path:
    trial = "-".join(map(str, ends))
    ended, run = start(place, f"pieces-{trial}", *EPOCH, *ONE_LAYOUT, f"total_train_steps={ends[0]}")
    assert ended.status == 0, f"{ended.err}\n{log_tails(run)}"
    for end in ends[1:]:
        call("resume", str(run), f"total_train_steps={end}").expect()
    return run


@pytest.fixture(scope="module")
def whole(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    return end_of(in_pieces(Place(models, tmp_path_factory.mktemp("whole")), [TOTAL]))


def check(models: Path, tmp_path: Path, whole: dict, ends: list[int]) -> None:
    run = in_pieces(Place(models, tmp_path), ends)
    assert [record["step"] for record in steps(run)] == list(range(1, TOTAL + 1))
    found = differences(whole, end_of(run))
    assert not found, "\n".join([str(ends), *found])
    launcher("audit", str(run)).expect()


def test_a_run_in_three_pieces_is_the_run_in_one(models: Path, tmp_path: Path, whole: dict) -> None:
    """The second piece ends exactly at the epoch's end."""
    check(models, tmp_path, whole, [1, 3, TOTAL])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_any_split_is_the_run_in_one(models: Path, tmp_path: Path, whole: dict, seed: int) -> None:
    draw = random.Random(seed)
    ends = sorted(draw.sample(range(1, TOTAL), draw.randint(1, TOTAL - 2)))
    check(models, tmp_path, whole, [*ends, TOTAL])


def test_what_may_change_takes_effect_and_what_cannot_is_refused_by_name(models: Path, tmp_path: Path) -> None:
    place = Place(models, tmp_path)
    ended, run = start(place, "changed", *EPOCH, "total_train_steps=2", "allocation_mode=embedded:d1+archon:d1")
    assert ended.status == 0, f"{ended.err}\n{log_tails(run)}"
    for change in ("seed=7", "train_dataset.batch_size=2", "gconfig.n_samples=2", f"actor.path={models / 'other'}"):
        refused = call("resume", str(run), "total_train_steps=4", change)
        assert refused.status == 2, f"{change}: {refused.err}"
        assert change.partition("=")[0] in refused.err and "Traceback" not in refused.err
    said = json.loads(launcher("replay", str(run), "--step", "2", "--json").expect().out)
    assert said["same"] is True, said

    words = ["total_train_steps=6", "actor.optimizer.lr=3e-5", "recover.freq_steps=2", "recover.keep=9"]
    call("resume", str(run), *words, "allocation_mode=embedded:d1+archon:d2").expect()
    records = steps(run)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["lr"] for record in records] == pytest.approx([1e-4] * 2 + [3e-5] * 4)
    kept = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    assert kept == [1, 2, 4, 6]
    assert len(list((run / "logs" / "2" / "training-0").glob("rank-*.log"))) == 2
    launcher("audit", str(run)).expect()
    assert not [record for record in lines(run / "metrics.jsonl") if record["kind"] == "step" and record["skipped"]]
