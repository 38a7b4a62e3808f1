"""Two gloo ranks compute what one process does: collectives, cut layers, sharded scores, loading into shards."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from core.ops.packed import PackedBatch, Scoring
from tests.model import ranks
from tests.model.checkpoints import (
    IMAGE,
    VIDEO,
    Document,
    Shape,
    distance,
    document,
    hf_logits,
    pack,
    pixels,
    saved,
    vlm,
)

SHAPES = {"untied": Shape(), "tied": Shape(tied=True)}


def documents() -> tuple[list[Document], list[Tensor | None]]:
    rng = np.random.default_rng(11)
    items = [document(rng, 5, (1, 4, 6), 7), document(rng, 9), document(rng, 3, (1, 6, 10), 4)]
    return items, [pixels(rng, d.grids) if d.grids else None for d in items]


def batch() -> PackedBatch:
    items, patches = documents()
    packed = pack(items, torch.cat([p for p in patches if p is not None]))
    rows = torch.tensor([14, 15, 16, 20, 28, 48])
    early = torch.tensor([True, False] * 3)
    scoring = Scoring(rows, packed.input_ids_T[rows + 1], 0.8, (IMAGE, VIDEO), (2,), early, True)
    return replace(packed, scoring=scoring)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    checkpoints = {name: saved(vlm(shape), folder / name) for name, shape in SHAPES.items()}
    started = mp.spawn(ranks.run, (folder, checkpoints, batch()), nprocs=ranks.WORLD, join=False)
    try:
        deadline = time.monotonic() + 90
        while not started.join(max(0.1, deadline - time.monotonic())):
            assert time.monotonic() < deadline, "the ranks did not finish"
    finally:
        for process in started.processes:
            process.kill()
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(ranks.WORLD)]


def reference(shape: Shape) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Logits, scores and gradients by hub name from transformers, the scores by the naive formula."""
    model = vlm(shape)
    items, patches = documents()
    logits = torch.cat([hf_logits(model, d, p) for d, p in zip(items, patches, strict=True)])
    scoring = batch().scoring
    assert scoring is not None and scoring.early_R is not None
    mask = torch.zeros(len(scoring.row_R), logits.shape[1], dtype=torch.bool)
    mask[:, [IMAGE, VIDEO]] = True
    mask[:, 2] |= scoring.early_R
    logp = (logits[scoring.row_R] / scoring.temperature).masked_fill(mask, -torch.inf).log_softmax(-1)
    entropy = -(logp.exp() * logp.masked_fill(mask, 0.0)).sum(-1)
    chosen = logp.gather(1, scoring.target_R[:, None])[:, 0]
    (chosen.sum() + entropy.square().sum()).backward()
    grads = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return logits.detach(), chosen.detach(), entropy.detach(), grads


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_cut_in_two_is_the_same_model(found: list[dict[str, Any]], name: str) -> None:
    logits, logp, entropy, grads = reference(SHAPES[name])
    both = [rank[name]["tp"] for rank in found]
    for rank in both:
        assert distance(rank["logits"], logits) <= 1e-5
        assert distance(rank["logp"], logp) <= 1e-5
        assert distance(rank["entropy"], entropy) <= 1e-5
    assert set(both[0]["grads"]) == set(grads)
    rows, columns = grads["model.layers.0.self_attn.o_proj.weight"].shape
    assert both[0]["o_proj"] == (rows, columns // 2)
    for key, expected in grads.items():
        for rank in both:
            assert distance(rank["grads"][key], expected) <= 1e-5, key


@pytest.mark.parametrize("name", SHAPES)
def test_a_checkpoint_goes_straight_into_fsdp_shards(found: list[dict[str, Any]], name: str) -> None:
    _, logp, _, grads = reference(SHAPES[name])
    expected = {
        key.replace("model.language_model.", "model.").replace("model.visual.", "visual."): p
        for key, p in vlm(SHAPES[name]).named_parameters()
    }
    for rank in found:
        result = rank[name]["fsdp"]
        assert set(result["loaded"]) == set(expected)
        for key, tensor in expected.items():
            assert torch.equal(result["loaded"][key], tensor), key
        assert distance(result["logp"], logp) <= 1e-5
        for key, grad in grads.items():  # both ranks had the same batch and FSDP averages
            assert distance(result["grads"][key], grad) <= 1e-5, key


def test_collectives_and_their_gradients(found: list[dict[str, Any]]) -> None:
    x = [torch.arange(8.0).reshape(2, 4) + 100 * rank for rank in range(2)]

    def upstream(shape: tuple[int, int]) -> list[Tensor]:
        return [torch.arange(float(shape[0] * shape[1])).reshape(shape) + 1000 * rank for rank in range(2)]

    same, wide, tall, flat = (upstream(s) for s in ((2, 4), (2, 8), (4, 4), (1, 4)))
    side, stacked, total = torch.cat(x, 1), torch.cat(x, 0), x[0] + x[1]
    expected = {
        "copy": [(x[r], same[0] + same[1]) for r in range(2)],
        "gather": [(side, wide[r][:, 4 * r : 4 * r + 4]) for r in range(2)],
        "gather_sum": [(stacked, (tall[0] + tall[1])[2 * r : 2 * r + 2]) for r in range(2)],
        "reduce_scatter": [(total[r : r + 1], torch.cat(flat, 0)) for r in range(2)],
    }
    for name, by_rank in expected.items():
        for rank, (output, grad) in enumerate(by_rank):
            got = found[rank]["collectives"][name]
            assert torch.equal(got[0], output) and torch.equal(got[1], grad), (name, rank)


def test_features_that_do_not_divide_are_refused(found: list[dict[str, Any]]) -> None:
    assert "9 features in 9 blocks do not divide among 2 tensor-parallel ranks" in found[0]["uneven"]
