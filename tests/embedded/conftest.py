"""Checkpoints of the embedded server's tests, made once per process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from launcher.roles.tiny.checkpoint import TinyModel, write_checkpoint
from tests.embedded.harness import Remote, serving

torch.set_num_threads(1)

SHAPES = {
    "vision": TinyModel(jitter=0.1, seed=1, initializer_range=0.1),
    "vision_after": TinyModel(jitter=0.1, seed=2, initializer_range=0.1),
    "vision_untied": TinyModel(
        jitter=0.1, seed=3, hidden=96, heads=6, kv_heads=2, layers=3, tied=False, vision_depth=3
    ),
    "text": TinyModel(jitter=0.1, seed=4, text_only=True, heads=4, kv_heads=1),
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    for name, shape in SHAPES.items():
        write_checkpoint(root / name, shape)
    return {name: root / name for name in SHAPES}


@pytest.fixture
def remote(checkpoints: dict[str, Path]) -> Iterator[Remote]:
    with serving(checkpoints["vision"], max_running_requests=16) as served:
        yield served
