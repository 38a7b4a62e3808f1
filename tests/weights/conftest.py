"""A small checkpoint's worth of tensors, and versions published from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.weights.manifest import Manifest
from core.weights.publish import publish

Publish = Callable[..., Manifest]


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(64, 16, generator=made),
        "model.layers.0.mlp.up_proj.weight": torch.randn(32, 16, generator=made).to(torch.bfloat16),
        "model.norm.weight": torch.randn(16, generator=made),
        "visual.patch_embed.proj.weight": torch.randn(8, 3, 2, 14, 14, generator=made),
        "lm_head.weight": torch.randn(16, 64, generator=made).T,  # not contiguous
        "scalar": torch.tensor(3.5, dtype=torch.float64),
    }


@pytest.fixture
def aux_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "qwen2_5_vl", "torch_dtype": "bfloat16"}')
    (directory / "preprocessor_config.json").write_text('{"min_pixels": 3136}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"not to be copied")
    return directory


@pytest.fixture
def publish_alone(tmp_path: Path, aux_dir: Path) -> Publish:
    """Publishes with one rank into tmp_path/weights."""

    def run(name: str, tensors: dict[str, torch.Tensor], version: int = 0) -> Manifest:
        return publish(
            tmp_path / "weights",
            name,
            tensors,
            aux_dir,
            rank=0,
            world=1,
            gather=lambda item: [item],
            barrier=lambda: None,
            version=version,
            generation=0,
            lineage=[(version, 0)],
        )

    return run
