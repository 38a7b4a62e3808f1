"""Whole runs against a server that makes one mistake: the gate stops them before anything is trained, and names it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.support.runs import ROOT, Ended, await_gone, launcher, lines, log_tails, steps

TEMPERATURE = 0.7
# half of the vocabulary ends a sample: what is banned before min_new_tokens carries half of the mass
ENDS = list(range(3, 203))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    launcher("make-model", str(root / "tiny"), "--pictures", str(root / "pictures")).expect()
    launcher("make-model", str(root / "other"), "--seed", "7", "--pictures", str(root / "pictures")).expect()
    return root


def python_of(mistake: str, models: Path) -> Path:
    """What stands in SGLang's place."""
    path = models / f"python-{mistake}"
    server = ROOT / "tests" / "servers" / "broken_server.py"
    # -P and -m sglang.launch_server are what an interpreter would have taken
    path.write_text(
        f"#!/bin/sh\nshift 3\nexport PYTHONPATH={ROOT} OTHER_MODEL={models / 'other'}\n"
        f'exec {sys.executable} -P {server} {mistake} "$@"\n'
    )
    path.chmod(0o755)
    return path


def run(mistake: str, models: Path, place: Path, *more: str) -> tuple[Ended, Path]:
    words = [
        *("run", "--emulate", "configs/smoke.yaml", "allocation_mode=sglang:d1+archon:d1", "embedded.stands_in=false"),
        *("sglang.context_length=2048", f"paths.sglang_python={python_of(mistake, models)}"),
        *(f"actor.path={models / 'tiny'}", f"train_dataset.path={models / 'pictures'}"),
        *(f"valid_dataset.path={models / 'pictures'}", f"cluster.fileroot={place}"),
        *(f"gconfig.temperature={TEMPERATURE}", "gconfig.min_new_tokens=3", f"gconfig.stop_token_ids={ENDS}"),
        *("rollout.parity_check_steps=2", "experiment_name=gate", f"trial_name={mistake}", *more),
    ]
    return launcher(*words, timeout=280), place / "gate" / mistake


MISTAKES = {
    "temperature": r"sample at temperature 1\.1\d",  # 0.7 × broken_server.FACTOR
    "bans": "leave in what the run bans",
    "weights": "answer with other weights than they say",
    "images": "does not see them",
    "ids": "prompt ids differ",
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_stops_the_run_before_its_first_step_and_is_named(mistake: str, models: Path, tmp_path: Path) -> None:
    ended, directory = run(mistake, models, tmp_path)
    said = ended.out + ended.err
    assert ended.status == 1 and re.search(MISTAKES[mistake], said), said[-3000:] + log_tails(directory)
    assert steps(directory) == []
    await_gone(directory)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mistake", "old"), [("none", 2), ("images", 0)])
def test_the_gate_is_passed_or_told_to_be_open_and_asked_again(
    mistake: str, old: int, models: Path, tmp_path: Path
) -> None:
    """Two batches behind, no token of a batch is of the trainer's version: each server is asked for fresh ones."""
    more = ["rollout.parity=warn", f"rollout.max_head_offpolicyness={old}"]
    ended, directory = run(mistake, models, tmp_path, *more)
    assert ended.status == 0, log_tails(directory)
    records = steps(directory)
    gated = [record["step"] for record in records if record["parity_tokens"]]
    assert [record["step"] for record in records] == [1, 2, 3] and gated == [1, 2]
    tokens = [record["parity_tokens"] for record in records if record["parity_tokens"]]
    assert tokens[0] >= 48 and (tokens[1] == 2 * 4 if old else tokens[1] >= 48)
    assert all(record["parity_image_effect"] > 0 for record in records if record["parity_tokens"])
    notes = [str(line) for line in lines(directory / "metrics.jsonl") if line["kind"] != "step"]
    named = [line for line in notes if "see other images" in line]
    blind = log_tails(directory).count("does not see them")
    if mistake == "none":
        assert named == [] and all(record["parity_mean"] <= 1e-4 for record in records if record["parity_tokens"])
        assert blind == 0
    else:
        assert len(named) == 2, notes
        assert blind == 2, "asked again after parity_check_steps versions"
    await_gone(directory)
