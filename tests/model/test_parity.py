"""Logits and gradients equal those of transformers, document by document against one packed stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.ops.packed import PackedBatch
from models.archon.qwen2.model import Qwen2Model, Qwen2ModelArgs, Qwen2StateDictAdapter
from tests.model.checkpoints import Document, Shape, distance, document, hf_logits, pack, pixels, saved, text_model, vlm

PLAIN = Shape()
SHAPES = {
    "plain": PLAIN,
    "tied": Shape(tied=True),
    "one-kv-head": Shape(heads=4, kv_heads=1, vision_heads=4),
    "no-gqa": Shape(heads=2, kv_heads=2, section=(2, 3, 3), vision_depth=4, full=(0, 3)),
    "published-head-widths": Shape(heads=4, kv_heads=1, hidden=512, section=(16, 24, 24), vision_hidden=160),
    "six-heads": Shape(heads=6, kv_heads=2, hidden=48, section=(2, 1, 1), layers=3, merge_window=56),
}


def compare(
    hf: Any, ours: Qwen2Model, documents: list[Document], patches: list[torch.Tensor | None], tol: float
) -> None:
    present = [p for p in patches if p is not None]
    packed = pack(documents, torch.cat(present) if present else None)
    logits = ours(packed).logits_RV
    assert logits is not None
    expected = torch.cat([hf_logits(hf, d, p) for d, p in zip(documents, patches, strict=True)])
    assert logits.dtype == expected.dtype
    assert distance(logits, expected) <= tol
    weight = torch.from_numpy(np.random.default_rng(3).standard_normal(tuple(expected.shape))).to(expected.dtype)
    (expected * weight).sum().backward()
    (logits * weight).sum().backward()
    compare_gradients(hf, ours, tol)


def compare_gradients(hf: Any, ours: Qwen2Model, tol: float) -> None:
    adapter = Qwen2StateDictAdapter(ours.args)
    found = dict(ours.named_parameters())
    expected = {adapter.hub_name(name): parameter for name, parameter in hf.named_parameters()}
    assert set(found) == set(expected)
    for name, parameter in expected.items():
        if parameter.grad is None:
            assert found[name].grad is None, name
            continue
        grad = found[name].grad
        assert grad is not None, name
        assert distance(grad, parameter.grad) <= tol, name


def both(hf: Any, path: Path) -> Qwen2Model:
    dtype = next(hf.parameters()).dtype
    return Qwen2Model(Qwen2ModelArgs.from_pretrained(saved(hf, path), dtype=dtype))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_packed_documents_with_images(tmp_path: Path, rng: np.random.Generator, shape: Shape) -> None:
    hf = vlm(shape)
    documents = [
        document(rng, 5, (1, 4, 6), 7),
        document(rng, 11),
        document(rng, 2, (1, 10, 18), (1, 2, 2), 3),
        document(rng, 1),
        document(rng, 4, (1, 4, 6), 8),
    ]
    patches = [pixels(rng, d.grids) if d.grids else None for d in documents]
    compare(hf, both(hf, tmp_path), documents, patches, 1e-5)


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 2, 120), (1, 130, 2), (1, 34, 26), (1, 8, 8), (1, 16, 24)])
def test_extreme_image_sizes(tmp_path: Path, rng: np.random.Generator, grid: tuple[int, int, int]) -> None:
    hf = vlm(PLAIN)
    item = document(rng, 3, grid, 4)
    compare(hf, both(hf, tmp_path), [item], [pixels(rng, [grid])], 1e-5)


def test_videos(tmp_path: Path, rng: np.random.Generator) -> None:
    hf = vlm(PLAIN)
    documents = [document(rng, 3, "2x8x10", 4), document(rng, 3, "5x4x4", "1x6x2", 2), document(rng, 2, (1, 4, 4), 2)]
    patches: list[torch.Tensor | None] = [pixels(rng, d.grids + d.videos) for d in documents]
    compare(hf, both(hf, tmp_path), documents, patches, 1e-5)


def test_text_without_an_image_leaves_the_tower_alone(tmp_path: Path, rng: np.random.Generator) -> None:
    hf = vlm(PLAIN)
    documents = [document(rng, n) for n in (9, 9, 9)]
    compare(hf, both(hf, tmp_path), documents, [None] * 3, 1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_text_only_checkpoint(tmp_path: Path, rng: np.random.Generator, tied: bool) -> None:
    hf = text_model(Shape(tied=tied))
    documents = [document(rng, n) for n in (40, 3, 17, 17, 38, 1)]
    compare(hf, both(hf, tmp_path), documents, [None] * 6, 1e-5)


def test_float64_is_float64_throughout(tmp_path: Path, rng: np.random.Generator) -> None:
    """transformers rounds rope and norms to float32 on the way, so the distance is its own; ours is checked by dtype
    at every module and by the derivative along a random direction, which float32 anywhere would spoil."""
    hf = vlm(PLAIN, dtype=torch.float64)
    ours = both(hf, tmp_path)
    documents = [document(rng, 5, (1, 4, 6), 7), document(rng, 6)]
    patches = [pixels(rng, documents[0].grids, torch.float64), None]
    compare(hf, ours, documents, patches, 1e-5)

    packed = pack(documents, patches[0])
    narrow: list[str] = []
    for name, module in ours.named_modules():
        module.register_forward_hook(
            lambda _m, _i, out, name=name: (
                narrow.append(name) if isinstance(out, torch.Tensor) and out.dtype != torch.float64 else None
            )
        )
    assert directional_error(ours, packed) <= 1e-6  # float32 anywhere gives 1e-2
    assert not narrow


def directional_error(model: Qwen2Model, packed: PackedBatch) -> float:
    """Relative distance of the gradient along a direction from a central difference of step 1e-5."""
    generator = torch.Generator().manual_seed(5)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]

    def loss() -> torch.Tensor:
        logits = model(packed).logits_RV
        assert logits is not None
        return logits.log_softmax(-1)[:, 5].sum()

    model.zero_grad()
    loss().backward()
    slope = sum(
        (d * p.grad).sum().item() for d, p in zip(directions, model.parameters(), strict=True) if p.grad is not None
    )
    values = []
    with torch.no_grad():
        for step in (1e-5, -2e-5):
            for direction, parameter in zip(directions, model.parameters(), strict=True):
                parameter.add_(direction, alpha=step)
            values.append(loss().item())
    return abs((values[0] - values[1]) / 2e-5 - slope) / abs(slope)


def test_bfloat16_rounds_as_transformers_does(tmp_path: Path, rng: np.random.Generator) -> None:
    hf = vlm(PLAIN).to(torch.bfloat16)
    ours = both(hf, tmp_path)
    item = document(rng, 5, (1, 8, 12), 7)
    patches = pixels(rng, item.grids)
    exact = hf_logits(vlm(PLAIN), item, patches)
    theirs = hf_logits(hf, item, patches.bfloat16()).float()
    logits = ours(pack([item], patches)).logits_RV
    assert logits is not None and logits.dtype == torch.bfloat16
    # as near to the exact model as transformers' own bfloat16
    assert distance(logits.float(), exact) <= 1.5 * distance(theirs, exact)
