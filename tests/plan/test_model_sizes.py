"""Sizes of models: published counts, both layouts of config.json, and what is missing in a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from launcher.model_sizes import ModelError, carried, checkpoint_problems, read_shape, shape_of
from launcher.roles.tiny.checkpoint import TinyModel, write_checkpoint

# parameter counts that the hub shows for these checkpoints' safetensors files
PUBLISHED = {
    "Qwen/Qwen2-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
    "Qwen/Qwen2.5-Math-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-Coder-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen2-72B": 72_706_203_648,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
}


@pytest.mark.parametrize(("name", "params"), PUBLISHED.items())
def test_carried_sizes_give_the_published_count(name: str, params: int) -> None:
    shape = carried(name)
    assert shape is not None and shape.params == params


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "Qwen/Qwen2-VL-7B-Instruct", "Qwen/Qwen2.5-VL-5B", "x", "a/b/c"])
def test_other_names_are_not_carried(name: str, tmp_path: Path) -> None:
    assert carried(name) is None
    with pytest.raises(ModelError, match="not carried"):
        shape_of(name, tmp_path)


@pytest.mark.parametrize("options", [{}, {"tied": False}, {"text_only": True, "kv_heads": 4}, {"vision_depth": 3}])
def test_count_is_that_of_the_tensors_on_disk(options: dict, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TinyModel(**options))
    counted = 0
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, framework="numpy") as file:
            counted += sum(int(np.prod(file.get_slice(name).get_shape())) for name in list(file.keys()))
    shape = read_shape(tmp_path)
    assert shape.params == counted
    assert checkpoint_problems(tmp_path) == []


def test_nested_config_reads_as_the_flat_one(tiny: Path, tmp_path: Path) -> None:
    flat = json.loads((tiny / "config.json").read_text())
    outside = {"vision_config", "tie_word_embeddings", "model_type", "image_token_id", "video_token_id"}
    nested = {key: value for key, value in flat.items() if key in outside}
    nested["text_config"] = {key: value for key, value in flat.items() if key not in outside}
    nested["text_config"]["model_type"] = "qwen2_5_vl_text"
    nested["vision_config"]["in_channels"] = nested["vision_config"].pop("in_chans")
    (tmp_path / "config.json").write_text(json.dumps(nested))
    shutil.copy(tiny / "preprocessor_config.json", tmp_path)
    assert read_shape(tmp_path, name="m") == read_shape(tiny, name="m").__class__(
        **{**vars(read_shape(tiny, name="m")), "source": str(tmp_path)}
    )


def test_the_local_config_wins_over_the_carried_sizes(tiny: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen2.5-VL-3B-Instruct" / "snapshots" / "abc"
    shutil.copytree(tiny, snapshot)
    shape = shape_of("Qwen/Qwen2.5-VL-3B-Instruct", tmp_path)
    assert (shape.hidden, shape.source) == (128, str(snapshot))


def test_a_missing_a_short_and_a_pointer_shard_are_named(tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    first, second = sorted(broken.glob("model-*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-10])
    (broken / "tokenizer.json").unlink()
    problems = checkpoint_problems(broken)
    assert [problem.split(":")[0] for problem in problems] == [str(first), str(second), str(broken)]
    assert "shard is missing" in problems[0] and "copy this shard again" in problems[1]
    first.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "Git LFS pointer" in checkpoint_problems(broken)[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"hidden_size": "128"}, "hidden_size is '128'"),
        ({"vision_config": {"depth": 2}}, "vision_config: 'hidden_size'"),
    ],
)
def test_a_config_that_cannot_be_used_names_its_key(change: dict, words: str, tiny: Path, tmp_path: Path) -> None:
    raw = json.loads((tiny / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        read_shape(tmp_path)
    assert words in str(caught.value)
