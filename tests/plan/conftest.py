"""Configurations to plan: the recipe, with keys changed, and a tiny checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from core.config import Config, load
from launcher.roles.tiny.checkpoint import TinyModel, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "qwen2_5_vl_3b_geometry3k_grpo.yaml"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    write_checkpoint(path, TinyModel())
    return path


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Config]:
    """The recipe with overrides; nothing of the machine's own caches is read."""

    def configure(*overrides: str) -> Config:
        return load(RECIPE, [f"paths.cache={tmp_path / 'cache'}", *overrides], on_warning=lambda line: None)

    return configure


@pytest.fixture(autouse=True)
def no_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "no-hub-cache"))
