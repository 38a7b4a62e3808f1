"""The tiny checkpoint as transformers and safetensors read it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoTokenizer,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2ForCausalLM,
)

from core.data.tokenizer import Tokenizer
from launcher.roles.make_model import main
from launcher.roles.tiny.checkpoint import ShapeError, TinyModel, write_checkpoint
from launcher.roles.tiny.tokenizer import SPECIAL_TOKENS, build


def tensors(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            found |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118
    return found


def loaded(kind: Any, path: Path) -> tuple[Any, dict[str, Any]]:
    return kind.from_pretrained(path, output_loading_info=True, dtype="auto")


@pytest.mark.parametrize(
    "flags", [[], ["--untied", "--heads", "8", "--kv-heads", "1"], ["--dtype", "bfloat16", "--shards", "5"]]
)
def test_transformers_loads_every_tensor(tmp_path: Path, flags: list[str]) -> None:
    assert main([str(tmp_path), *flags]) == 0
    model, info = loaded(Qwen2_5_VLForConditionalGeneration, tmp_path)
    assert not any(info.values()), info
    assert model.dtype == (torch.bfloat16 if "bfloat16" in flags else torch.float32)
    text = model.model.language_model
    assert (model.lm_head.weight.data_ptr() == text.embed_tokens.weight.data_ptr()) == ("--untied" not in flags)
    assert text.layers[0].self_attn.q_proj.bias is not None
    written = tensors(tmp_path)
    for name, value in model.state_dict().items():
        hub = name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
        if hub in written:
            assert torch.equal(value, written.pop(hub)), hub
    assert not written


def test_defaults_are_the_quickstart_model(tiny_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_path)
    text, vision = config.text_config, config.vision_config
    assert (text.hidden_size, text.num_hidden_layers, text.num_attention_heads, text.num_key_value_heads) == (
        128,
        2,
        4,
        2,
    )
    assert (text.intermediate_size, text.vocab_size, text.initializer_range) == (256, 512, 0.05)
    assert text.rope_parameters["mrope_section"] == [4, 6, 6]
    assert text.rope_parameters["rope_theta"] == 1e4
    assert (vision.depth, vision.hidden_size, vision.num_heads, vision.intermediate_size) == (2, 64, 4, 128)
    assert vision.fullatt_block_indexes == [1]
    weights = tensors(tiny_path)
    assert float(weights["model.layers.0.mlp.up_proj.weight"].std()) == pytest.approx(0.05, rel=0.02)
    assert torch.equal(weights["model.norm.weight"], torch.ones(128))
    assert not weights["visual.blocks.0.attn.qkv.bias"].any()


def test_files_are_shaped_as_the_hub_ships_them(tiny_path: Path) -> None:
    config = json.loads((tiny_path / "config.json").read_text())
    assert "text_config" not in config
    assert config["rope_scaling"]["type"] == "mrope"
    assert "in_chans" in config["vision_config"]
    assert len(json.loads((tiny_path / "generation_config.json").read_text())["eos_token_id"]) == 2
    index = json.loads((tiny_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    weights = tensors(tiny_path)
    assert set(index["weight_map"]) == set(weights)
    assert "lm_head.weight" not in weights
    assert index["metadata"]["total_size"] == sum(4 * value.numel() for value in weights.values())
    assert len(AutoTokenizer.from_pretrained(tiny_path)) < config["vocab_size"]
    processor = AutoImageProcessor.from_pretrained(tiny_path, backend="pil")
    assert (processor.size["shortest_edge"], processor.size["longest_edge"]) == (3136, 12845056)


def test_bfloat16_is_the_rounding_of_float32(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "wide", TinyModel(jitter=0.1))
    write_checkpoint(tmp_path / "narrow", TinyModel(jitter=0.1, dtype="bfloat16"))
    wide, narrow = tensors(tmp_path / "wide"), tensors(tmp_path / "narrow")
    assert wide.keys() == narrow.keys()
    for name, value in wide.items():
        assert torch.equal(value.to(torch.bfloat16), narrow[name]), name


def test_weights_depend_on_seed_and_name_only(tmp_path: Path, tiny_path: Path) -> None:
    write_checkpoint(tmp_path / "shards", TinyModel(shards=4))
    write_checkpoint(tmp_path / "seed", TinyModel(seed=1))
    same, other, mine = tensors(tmp_path / "shards"), tensors(tmp_path / "seed"), tensors(tiny_path)
    assert all(torch.equal(value, same[name]) for name, value in mine.items())
    assert not torch.equal(mine["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_a_text_model_has_no_tower(tmp_path: Path) -> None:
    assert main([str(tmp_path), "--text-only", "--untied"]) == 0
    model, info = loaded(Qwen2ForCausalLM, tmp_path)
    assert not any(info.values()), info
    assert not (tmp_path / "preprocessor_config.json").exists()
    assert model.config.tie_word_embeddings is False


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--heads", "3"], "hidden 128 is not a multiple of heads 3"),
        (["--kv-heads", "3"], "kv_heads 3"),
        (["--vocab", "300"], "vocab 300 is smaller than the tokenizer's"),
        (["--dtype", "float16"], "dtype float16"),
        (["--shards", "0"], "shards 0"),
        (["--max-pixels", "100"], "max_pixels 100"),
    ],
)
def test_sizes_that_do_not_fit_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], named: str
) -> None:
    assert main([str(tmp_path / "out"), *flags]) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file" / "out")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err


def test_all_errors_of_sizes_come_at_once() -> None:
    with pytest.raises(ShapeError, match=r"heads.*dtype"):
        write_checkpoint(Path("/nowhere"), TinyModel(heads=3, dtype="int8"))


def test_special_tokens_come_after_the_vocabulary_as_in_qwen() -> None:
    vocabulary, merges, special = build()
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert [special[token] for token in SPECIAL_TOKENS] == list(range(len(vocabulary), len(vocabulary) + len(special)))
    assert len(vocabulary) == 256 + len({left + right for left, right in merges})


def test_the_quickstart_prompt_has_37_tokens(tokenizer: Tokenizer) -> None:
    for colour in ("red", "green", "blue"):
        text = f"How many {colour} shapes?"
        ids = tokenizer.encode(
            tokenizer.render([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}])
        )
        assert len(ids) + 9 - 1 == 37
    assert [len(tokenizer.encode(str(digit))) for digit in range(10)] == [1] * 10


def test_making_a_model_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; from launcher.roles.make_model import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, str(tmp_path / "model")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"
