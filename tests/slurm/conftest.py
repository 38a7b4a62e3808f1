"""The recipe on Slurm, and the script of any plan of it; nothing is sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from core.config import Config, load
from launcher.planning.judge import judge
from launcher.planning.known import read_known
from launcher.planning.layout import Plan
from launcher.run_dir import RunDir
from launcher.slurm.job import Job, job_of

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "qwen2_5_vl_3b_geometry3k_grpo.yaml"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no-hub-cache"))

    def configure(*overrides: str) -> Config:
        words = [f"paths.cache={tmp_path / 'cache'}", "scheduler.type=slurm", *overrides]
        return load(RECIPE, words, on_warning=lambda line: None)

    return configure


def plan_of(config: Config) -> Plan:
    """Where everything lies, also for what cannot be trained yet: a script does not depend on that."""
    known, _ = read_known(config, None)
    judged = judge(config, known, "cuda")
    return Plan(
        "geometry3k-grpo-trial0", "cuda", False, [], [], judged.partitions, judged.batch, [], 0, [], [], {},
        judged.shape.kind, judged.shape.why,
    )  # fmt: skip


def job_for(config: Config) -> Job:
    run_dir = RunDir(Path("/shared/runs/geometry3k-grpo/trial0"))
    return job_of(config, plan_of(config), run_dir, python="/opt/env/bin/python", code="/opt/vlm-rl")
