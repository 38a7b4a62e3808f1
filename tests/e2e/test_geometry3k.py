"""Real Geometry3K problems, in the parquet that the hub ships, through the whole job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.runs import Ended, lines, steps

pytestmark = [pytest.mark.geometry3k, pytest.mark.timeout(600)]
Emulate = Callable[..., tuple[Ended, Path]]


def rows(sample: Path) -> tuple[str, str]:
    return f"train_dataset.path={sample}", f"valid_dataset.path={sample}"


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_two_steps_change_every_parameter(emulate: Emulate, models: Path, geometry3k_sample: Path) -> None:
    ended, run = emulate("configs/geometry3k_cpu.yaml", *rows(geometry3k_sample), "total_train_steps=2", timeout=300)
    ended.expect()
    assert len(steps(run)) == 2
    assert all(record["grad_norm"] > 0 for record in steps(run))
    assert any(record["kind"] == "eval" for record in lines(run / "metrics.jsonl"))
    before, after = weights(models / "tiny"), weights(run / "hub" / "step-2")
    unchanged = [name for name in before if torch.equal(before[name], after[name])]
    assert unchanged == []


def test_the_recipe_itself_runs_on_a_laptop(emulate: Emulate, geometry3k_sample: Path) -> None:
    ended, run = emulate(
        "configs/qwen2_5_vl_3b_geometry3k_grpo.yaml",
        *rows(geometry3k_sample),
        "total_train_steps=2",
        timeout=500,
    )
    ended.expect()
    assert [record["step"] for record in steps(run)] == [1, 2]
    for key in ("allocation_mode", "dtype"):
        assert key in ended.err
