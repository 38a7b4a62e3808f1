"""Losses that are not finite: the step moves nothing and is counted; three in a row end the run, for good, and name
what to look at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.broken_runs import Place, start
from tests.support.runs import launcher, lines, log_tails, steps

pytestmark = pytest.mark.timeout(300)


def test_three_steps_that_are_not_finite_stop_the_run_and_name_the_batch(tmp_path: Path) -> None:
    launcher("make-model", str(tmp_path / "tiny"), "--pictures", str(tmp_path / "pictures")).expect()
    ended, run = start(
        Place(tmp_path, tmp_path), "overflow", "actor.reward_scaling=3e38", "actor.reward_clip=1e39",
        "actor.reward_norm=null", "actor.adv_norm=null", "valid_dataset=null", "total_train_steps=9",
    )  # fmt: skip
    assert ended.status == 1, log_tails(run)
    assert "3 steps in a row up to 3 were not finite" in ended.err, ended.err
    assert f"{run}/rollouts/batches/000003.safetensors" in ended.err
    assert f"python -m launcher replay {run} --step 3" in ended.err
    assert [record["skipped"] for record in steps(run)] == [True, True]
    notes = [record["message"] for record in lines(run / "metrics.jsonl") if record["kind"] == "note"]
    assert [note.split(":")[0] for note in notes if "moved nothing" in note] == [
        f"step {step} moved nothing" for step in (1, 2, 3)
    ]
    assert json.loads((run / "state.json").read_text())["generation"] == 0, "ranks that start again would see the same"
    said = json.loads(launcher("replay", str(run), "--step", "3", "--json").expect().out)
    assert said["replayed"]["skipped"] is True
