"""The audit passes what a run writes, and names each thing that a doctored run directory has wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.config import load_text
from core.rl.trajectory import Group, Sample
from core.rollout.journal import Journal
from core.telemetry.files import append_line, read_lines
from launcher.auditing import audit
from launcher.run_dir import RunDir
from tests.support.runs import launcher

CONFIG = """
experiment_name: a
trial_name: t
allocation_mode: embedded:d1+archon:d1
actor: {path: /nowhere}
train_dataset: {path: /nowhere, batch_size: 2}
gconfig: {n_samples: 2}
rollout: {max_head_offpolicyness: 1}
"""


def sample(epoch: int, position: int, i: int, version: int) -> Sample:
    return Sample(
        sample_id=f"{epoch}-{position}-{i}",
        group_id=f"{epoch}-{position}",
        prompt_id=f"train-{position}",
        epoch=epoch,
        prompt_ids=np.arange(3, dtype=np.int32),
        sampled_ids=np.arange(2, dtype=np.int32),
        logprobs=np.zeros(2, np.float32),
        versions=np.full(2, version, np.int32),
        finish_reason="stop",
        reward=1.0,
        started_version=version,
    )


def group(epoch: int, position: int, version: int) -> Group:
    samples = tuple(sample(epoch, position, i, version) for i in range(2))
    return Group(f"{epoch}-{position}", epoch, position, f"train-{position}", version, samples)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Three batches of two over one epoch of four places, one of them void, written by the run's own writers."""
    run_dir = RunDir(tmp_path / "a" / "t")
    run_dir.create()
    run_dir.config.write_text(load_text(CONFIG, "audited.yaml").dump_yaml())
    journal = Journal(run_dir.batches, run_dir.images, run_dir.index, run_dir.void)
    journal.open()
    journal.start_behind(0)
    journal.write_batch(1, [group(0, 0, 0), group(0, 2, 0)], {"cursor_after": {"epoch": 0, "position": 3}}, {})
    journal.write_void({"epoch": 0, "position": 1, "group_id": "0-1", "reason": "bad row", "message": "x"})
    journal.write_batch(2, [group(0, 3, 0), group(1, 0, 1)], {"cursor_after": {"epoch": 1, "position": 1}}, {})
    journal.write_batch(3, [group(1, 1, 1), group(1, 2, 2)], {"cursor_after": {"epoch": 1, "position": 3}}, {})
    for step in (1, 2, 3):
        append_line(run_dir.metrics, {"kind": "step", "step": step, "version": step, "time": float(step)})
    return run_dir


def rewrite(path: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    lines = change(read_lines(path))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_as_it_is_written_passes(run: RunDir) -> None:
    found = audit(run)
    assert (found.problems, found.batches, found.groups, found.void, found.staleness_max) == ([], 3, 6, 1, 1)
    said = launcher("audit", str(run.root)).expect().out
    assert "every prompt was trained once" in said


def without(number: int) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda lines: [line for i, line in enumerate(lines) if i != number]


def changed(number: int, **values: Any) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    return lambda lines: [{**line, **values} if i == number else line for i, line in enumerate(lines)]


DOCTORED = {
    "a batch is gone": ("index", lambda lines: [line for line in lines if line["batch"] != 2], "batches 2 are missing"),
    "a group is gone": ("index", without(3), "batch 2 has 1 groups, not 2"),
    "trained twice": ("index", changed(4, epoch=0, position=0), "epoch 0 position 0 is in batches 1, 3"),
    "passed over": ("index", changed(5, position=3, group_id="1-3"), "epoch 1 position 2 were passed"),
    "too old": ("index", changed(5, started_version=0, version_min=0), "staleness 2 is not within 0 to 1"),
    "from the future": ("index", changed(5, version_max=3), "its tokens with 2 to 3, and trained at 2"),
    "out of order": ("index", lambda lines: [*lines[:4], lines[5], lines[4]], "not in admission order"),
    "versions back": ("index", changed(3, started_version=2, version_min=2), "staleness -1"),
    "void and trained": ("void", changed(0, position=2), "epoch 0 position 2 is void and in batch 1"),
    "void twice": ("void", lambda lines: lines * 2, "epoch 0 position 1 is void 2 times"),
    "void for nothing": ("void", changed(0, reason=""), "void without a reason"),
    "void forgotten": ("void", lambda lines: [], "epoch 0 position 1 were passed"),
    "a step is gone": ("metrics", without(1), "does not have steps 1 to 2"),
    "a step twice": ("metrics", lambda lines: [lines[0], *lines], "steps 1 are recorded more than once"),
    "a step without batch": (
        "metrics",
        lambda lines: [*lines, {"kind": "step", "step": 4, "time": 4.0}],
        "step 4 was trained, but only 3 batches",
    ),
}


@pytest.mark.parametrize("name", DOCTORED)
def test_a_doctored_run_is_named(run: RunDir, name: str) -> None:
    file, change, said = DOCTORED[name]
    rewrite(getattr(run, file), change)
    problems = audit(run).problems
    assert any(said in problem for problem in problems), problems


def test_a_batch_file_of_other_groups_is_named(run: RunDir) -> None:
    paths = sorted(run.batches.glob("*.safetensors"))
    paths[1].write_bytes(paths[2].read_bytes())
    assert any("holds groups 1-1, 1-2, the index says 0-3, 1-0" in each for each in audit(run).problems)
    paths[1].write_bytes(paths[1].read_bytes()[:100])
    assert any("cannot be read" in each for each in audit(run).problems)


def test_batches_that_were_lost_and_formed_anew_count_once(run: RunDir) -> None:
    """A broken batch 3 on a restart from step 2: its old lines are of a dead lineage."""
    (run.batches / "000003.safetensors").write_bytes(b"torn")
    journal = Journal(run.batches, run.images, run.index, run.void)
    journal.open()
    assert journal.start_behind(1) == 2
    journal.write_void({"epoch": 1, "position": 1, "group_id": "1-1", "reason": "bad row", "message": "x"})
    journal.write_batch(3, [group(1, 2, 1), group(1, 3, 2)], {"cursor_after": {"epoch": 1, "position": 4}}, {})
    found = audit(run)
    assert (found.problems, found.groups, found.starts) == ([], 6, 2)
