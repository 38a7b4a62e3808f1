"""Configurations of the hub and of transformers, flat and nested, give the same arguments; the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models.archon.qwen2.model import Qwen2Model, Qwen2ModelArgs
from models.archon.qwen2.model.args import ModelConfigError
from models.archon.registry import family_of
from tests.model.checkpoints import Shape, saved, text_model, vlm

# the published 3B file, shortened to what the model reads and what stands there without effect
HUB_3B: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 128000,
    "max_window_layers": 70,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 151936,
}


def written(path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_the_hubs_flat_file(tmp_path: Path) -> None:
    path = written(tmp_path, HUB_3B, {"eos_token_id": [151645, 151643], "temperature": 1e-6})
    args = Qwen2ModelArgs.from_pretrained(path, dtype="bfloat16", max_tokens_per_mb=4096)
    assert (args.dtype, args.max_tokens_per_mb, args.head_dim) == (torch.bfloat16, 4096, 128)
    assert (args.rope_theta, args.mrope_section, args.rms_norm_eps) == (1e6, (16, 24, 24), 1e-6)
    assert args.eos_token_ids == (151645, 151643)
    assert (args.image_token_id, args.video_token_id, args.tie_word_embeddings) == (151655, 151656, True)
    assert args.vision is not None
    assert (args.vision.in_channels, args.vision.fullatt_block_indexes) == (3, (7, 15, 23, 31))
    assert (args.spatial_merge_size, args.tokens_per_second) == (2, 2.0)
    model = Qwen2Model.on_meta(args)
    # 3.086 billion of text and 0.669 of vision, as published
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 3) == 3.755


def test_nested_files_of_transformers_say_the_same(tmp_path: Path) -> None:
    text = {k: v for k, v in HUB_3B.items() if k not in ("vision_config", "model_type", "architectures", "rope_theta")}
    text.pop("rope_scaling")
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    vision = dict(HUB_3B["vision_config"])
    vision["in_channels"] = vision.pop("in_chans")
    nested = {
        "model_type": "qwen2_5_vl",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": 151655,
        "video_token_id": 151656,
        "tie_word_embeddings": True,
    }
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    flat = Qwen2ModelArgs.from_pretrained(written(one, HUB_3B))
    other = Qwen2ModelArgs.from_pretrained(written(two, nested))
    assert {**vars(flat), "path": None} == {**vars(other), "path": None}


def test_what_transformers_saves_is_read(tmp_path: Path) -> None:
    args = Qwen2ModelArgs.from_pretrained(
        saved(vlm(Shape(heads=6, kv_heads=2, hidden=48, section=(2, 1, 1))), tmp_path)
    )
    assert (args.num_attention_heads, args.num_key_value_heads, args.head_dim) == (6, 2, 8)
    assert (args.mrope_section, args.rope_theta, args.eos_token_ids) == ((2, 1, 1), 1e4, (2,))
    assert family_of(tmp_path).model is Qwen2Model


def test_text_checkpoint_has_no_vision(tmp_path: Path) -> None:
    args = Qwen2ModelArgs.from_pretrained(saved(text_model(Shape()), tmp_path))
    assert (args.vision, args.image_token_id, args.mrope_section) == (None, None, (4, 0, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not built"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not built"),
        ({"use_sliding_window": True}, "use_sliding_window = True is not built"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1 is not built"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn' is not built"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, "mrope_section"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "big"}, "hidden_size is 'big'"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"image_token_id": None}, "image_token_id is missing"),
        ({"vision_config": {}}, r"vision_config.depth is missing"),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        Qwen2ModelArgs.from_pretrained(written(tmp_path, HUB_3B | change))


def test_a_broken_or_absent_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelConfigError, match=r"config\.json: no such file"):
        Qwen2ModelArgs.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match=r"config\.json: not JSON"):
        Qwen2ModelArgs.from_pretrained(tmp_path)
    with pytest.raises(ModelConfigError, match="no torch dtype"):
        Qwen2ModelArgs.from_pretrained(tmp_path, dtype="float33")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelConfigError, match="launcher prepare"):
        Qwen2ModelArgs.from_pretrained("nobody/nothing-of-this-name")
