"""Checkpoints in both layouts go in, the hub's comes out, bit for bit; what does not fit is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import Qwen2_5_VLForConditionalGeneration

from models.archon.qwen2.model import Qwen2Model, Qwen2ModelArgs, Qwen2StateDictAdapter
from models.archon.qwen2.model.state_dict_adapter import CheckpointError
from tests.model.checkpoints import Shape, saved, text_model, vlm


def tensors_of(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def newer_name(hub: str) -> str:
    """The module names of transformers 4.52 and later."""
    if hub.startswith("visual."):
        return "model." + hub
    return hub.replace("model.", "model.language_model.", 1) if hub.startswith("model.") else hub


def rewritten(path: Path, change: dict[str, Tensor]) -> None:
    for file in path.glob("*.safetensors*"):
        file.unlink()
    save_file(change, path / "model.safetensors")


def load(path: Path, dtype: str = "float32") -> Qwen2Model:
    return Qwen2Model(Qwen2ModelArgs.from_pretrained(path, dtype=dtype))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["hub", "newer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_is_bit_exact(tmp_path: Path, tied: bool, layout: str, dtype: torch.dtype) -> None:
    path = saved(vlm(Shape(tied=tied)).to(dtype), tmp_path / "in")
    expected = tensors_of(path)
    assert ("lm_head.weight" in expected) is not tied
    assert expected["visual.patch_embed.proj.weight"].dim() == 5
    if layout == "newer":
        rewritten(path, {newer_name(name): tensor for name, tensor in expected.items()})
    model = load(path, str(dtype).removeprefix("torch."))
    out = {name: tensor.detach() for name, tensor in model_adapter(model).tensors(model)}
    assert_same(out, expected)
    assert_same(model_adapter(model).to_hub(model.state_dict()), expected)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied

    save_file(out, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    again = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path, dtype=dtype).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(again[newer_name(name)], tensor), name


def model_adapter(model: Qwen2Model) -> Qwen2StateDictAdapter:
    return Qwen2StateDictAdapter(model.args)


def test_text_checkpoint_goes_round(tmp_path: Path) -> None:
    path = saved(text_model(Shape(tied=True)), tmp_path)
    model = load(path)
    assert_same({name: p.detach() for name, p in model_adapter(model).tensors(model)}, tensors_of(path))


def test_several_shards_and_an_index(tmp_path: Path) -> None:
    whole = vlm(Shape())
    whole.save_pretrained(tmp_path, max_shard_size="40KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    model = load(tmp_path)
    assert_same({name: p.detach() for name, p in model_adapter(model).tensors(model)}, tensors_of(tmp_path))
    files[1].unlink()
    with pytest.raises(CheckpointError, match=files[1].name):
        load(tmp_path)


def test_a_shard_cut_short_is_named(tmp_path: Path) -> None:
    path = saved(vlm(Shape()), tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(path)


def test_an_index_cannot_leave_its_directory(tmp_path: Path) -> None:
    path = saved(vlm(Shape()), tmp_path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../model.safetensors"}}))
    with pytest.raises(CheckpointError, match="no file of this directory"):
        load(path)
    (path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not an index"):
        load(path)


@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "twice", "empty"])
def test_a_wrong_tensor_is_named_and_nothing_is_copied(tmp_path: Path, fault: str) -> None:
    path = saved(vlm(Shape()), tmp_path)
    model = load(path)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tensors = tensors_of(path)
    name = "model.layers.1.self_attn.k_proj.bias"
    if fault == "missing":
        del tensors[name]
    elif fault == "extra":
        name = "model.layers.7.self_attn.k_proj.bias"
        tensors[name] = torch.zeros(3)
    elif fault == "shape":
        tensors[name] = torch.zeros(17)
    elif fault == "twice":
        tensors[newer_name(name)] = tensors[name].clone()
    else:
        tensors, name = {}, "neither model.safetensors"
    rewritten(path, tensors)
    if fault == "empty":
        (path / "model.safetensors").unlink()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        model_adapter(model).load_into(model, path)
    for key, parameter in model.named_parameters():
        assert torch.equal(parameter, 2 * before[key])


def test_a_tied_checkpoint_may_carry_an_equal_head_only(tmp_path: Path) -> None:
    path = saved(vlm(Shape(tied=True)), tmp_path)
    tensors = tensors_of(path)
    rewritten(path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    load(path)
    rewritten(path, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    with pytest.raises(CheckpointError, match="tie"):
        load(path)


def test_tensors_from_a_stream(tmp_path: Path) -> None:
    path = saved(vlm(Shape()), tmp_path)
    model, tensors = load(path), tensors_of(path)
    adapter = model_adapter(model)
    adapter.load_tensors(model, ((newer_name(name), tensor + 1) for name, tensor in tensors.items()))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, tensors[name] + 1)
    some = list(tensors.items())
    with pytest.raises(CheckpointError, match=f"missing tensors: {some[-1][0]}"):
        adapter.load_tensors(model, some[:-1])
    with pytest.raises(CheckpointError, match="came twice"):
        adapter.load_tensors(model, some[:1] * 2)
    with pytest.raises(CheckpointError, match="nonsense: unknown"):
        adapter.load_tensors(model, [("nonsense", torch.zeros(1))])
    with pytest.raises(CheckpointError, match=r"the model wants \[96, 32\]"):
        adapter.load_tensors(model, [("lm_head.weight", torch.zeros(95, 32))])


def test_whole_state_from_and_to_the_hub(tmp_path: Path) -> None:
    path = saved(vlm(Shape(tied=True)), tmp_path)
    model, tensors = load(path), tensors_of(path)
    state = model_adapter(model).from_hub({newer_name(name): tensor for name, tensor in tensors.items()})
    assert set(state) == set(model.state_dict())
    assert_same(model_adapter(model).to_hub(state), tensors)


def test_meta_model_loads_after_it_is_given_storage(tmp_path: Path) -> None:
    path = saved(vlm(Shape(tied=True)), tmp_path)
    args = Qwen2ModelArgs.from_pretrained(path)
    model = Qwen2Model.on_meta(args)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    model.tie()
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer)
    Qwen2StateDictAdapter(args).load_into(model, path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same({name: p.detach() for name, p in model_adapter(model).tensors(model)}, tensors_of(path))
