"""The main job, end to end: three GRPO steps with every process a user's run has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from tests.support.runs import Ended, await_gone, launcher, lines, processes_of, steps

pytestmark = pytest.mark.timeout(240)
Emulate = Callable[..., tuple[Ended, Path]]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_three_steps_train_publish_save_and_leave_nothing(
    emulate: Emulate, pictures: tuple[str, str], models: Path
) -> None:
    ended, run = emulate("configs/smoke.yaml", *pictures, "allocation_mode=embedded:d1+archon:d2", "seed=3")
    ended.expect()
    records = steps(run)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["staleness_max"] <= 1 for record in records)
    assert all(record["groups"] == 4 and record["samples"] == 16 for record in records)
    state = json.loads((run / "state.json").read_text())
    assert (state["phase"], state["step"]) == ("done", 3)
    assert processes_of(run) == []

    before, after = weights(models / "tiny"), weights(run / "hub" / "step-3")
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(run / "hub" / "step-3")
    tokenizer = AutoTokenizer.from_pretrained(run / "hub" / "step-3")
    ids = torch.tensor([tokenizer.encode("How many red shapes?")])
    assert torch.isfinite(model(input_ids=ids).logits).all()


@pytest.mark.parametrize("layout", ["d2t2", "d1c2t2"])
def test_a_cut_trainer_feeds_its_servers_whole_weights(
    emulate: Emulate, pictures: tuple[str, str], models: Path, layout: str
) -> None:
    """Synchronous in fp32: the servers' log-probabilities are the trainer's only if every shard reached them."""
    ended, run = emulate(
        "configs/smoke.yaml",
        *pictures,
        f"allocation_mode=embedded:d1+archon:{layout}",
        "rollout.max_head_offpolicyness=0",
        "actor.optimizer.lr=1e-3",
        timeout=200,
    )
    ended.expect()
    records = steps(run)
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["behave_diff_max"] < 1e-4 for record in records)
    assert len(list((run / "logs").glob("**/rank-*.log"))) == 4
    before, after = weights(models / "tiny"), weights(run / "hub" / "step-3")
    assert {name: tensor.shape for name, tensor in before.items()} == {n: t.shape for n, t in after.items()}
    assert processes_of(run) == []


def test_on_policy_ratios_are_one(emulate: Emulate, pictures: tuple[str, str]) -> None:
    """Synchronous, fp32: the trainer's logprobs are the server's, and the first minibatch's ratio is one."""
    for limit in (128, 2048):
        ended, run = emulate(
            "configs/smoke.yaml",
            *pictures,
            "rollout.max_head_offpolicyness=0",
            "total_train_steps=2",
            "gconfig.temperature=0.7",
            f"actor.mb_spec.max_tokens_per_mb={limit}",
            "train_dataset.dataset_kwargs.max_pixels=12544",
            "valid_dataset.dataset_kwargs.max_pixels=12544",
            trial=f"limit{limit}",
        )
        ended.expect()
        for record in steps(run):
            assert record["staleness_max"] == 0
            assert record["prox_ratio_max"] <= 1e-5, record
            assert record["behave_diff_max"] <= 1e-5, record


def test_resume_goes_on_where_the_run_stopped(emulate: Emulate, pictures: tuple[str, str]) -> None:
    ended, run = emulate("configs/smoke.yaml", *pictures, "total_train_steps=2")
    ended.expect()
    launcher("resume", str(run), "total_train_steps=4", timeout=110).expect()
    assert [record["step"] for record in steps(run)] == [1, 2, 3, 4]
    groups = lines(run / "rollouts" / "index.jsonl")
    places = [(group["epoch"], group["position"]) for group in groups]
    assert sorted(places) == [(0, position) for position in range(16)]
    assert processes_of(run) == []


def test_report_of_a_run_names_what_happened(emulate: Emulate, pictures: tuple[str, str]) -> None:
    ended, run = emulate("configs/smoke.yaml", *pictures, "evaluator.eval_before_train=true", "evaluator.freq_steps=2")
    ended.expect()
    summary = json.loads(launcher("report", str(run), "--json").expect().out)
    assert summary["steps"] == 3
    evaluations = summary["evaluations"]["valid"]
    assert [evaluation["step"] for evaluation in evaluations] == [0, 2, 3]
    assert evaluations[0]["version_min"] == evaluations[0]["version_max"] == 0
    assert evaluations[-1]["version_min"] == evaluations[-1]["version_max"] == 3
    launcher("report", str(run)).expect()
    page = next(run.glob("*.html")).read_text()
    assert "data:image/png;base64," in page and "How many" in page


def test_two_runs_started_in_the_same_second_both_finish(
    models: Path, tmp_path: Path, pictures: tuple[str, str]
) -> None:
    same = [
        f"cluster.fileroot={tmp_path}", f"actor.path={models / 'tiny'}", f"paths.cache={tmp_path / 'cache'}",
        "experiment_name=e2e", "total_train_steps=2", *pictures,
    ]  # fmt: skip
    for trial in ("a", "b"):
        launcher("submit", "--emulate", "configs/smoke.yaml", *same, f"trial_name={trial}").expect()
    for trial in ("a", "b"):
        launcher("logs", str(tmp_path / "e2e" / trial), "-f", timeout=180)
        assert json.loads((tmp_path / "e2e" / trial / "state.json").read_text())["phase"] == "done"
        await_gone(tmp_path / "e2e" / trial)


def test_without_a_learning_rate_twenty_versions_are_one(emulate: Emulate, pictures: tuple[str, str]) -> None:
    ended, run = emulate(
        "configs/smoke.yaml",
        *pictures,
        "actor.optimizer.lr=0.0",
        "total_train_steps=20",
        "weight_sync.keep=30",
        "valid_dataset=null",
        "recover.mode=disabled",
    )
    ended.expect()
    published = sorted((run / "weights").glob("v*/manifest.json"))
    assert len(published) == 21
    hashes = [{name: t["xxh3"] for name, t in json.loads(path.read_text())["tensors"].items()} for path in published]
    assert all(each == hashes[0] for each in hashes)
    for record in steps(run):
        assert record["behave_diff_max"] <= 1e-5, record
        assert record["sync_secs"] is not None
