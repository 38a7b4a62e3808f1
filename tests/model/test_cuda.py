"""The CUDA paths: varlen attention and the half-precision head, against float64 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from core.ops.attention import attention
from core.ops.logprob import segment_scores
from core.ops.packed import Scoring
from models.archon.qwen2.model import Qwen2Model, Qwen2ModelArgs
from tests.model.checkpoints import IMAGE, VIDEO, Shape, distance, document, pack, pixels, saved, vlm
from tests.model.test_attention import naive as naive_attention
from tests.model.test_logprob import inputs
from tests.model.test_logprob import naive as naive_scores

pytestmark = pytest.mark.gpu
BFLOAT16_STEP = 2**-8


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4, 80), (8, 2, 128)])
def test_varlen_attention_and_its_gradient(causal: bool, heads: tuple[int, int, int]) -> None:
    lengths = [64, 7, 1, 130]
    generator = torch.Generator().manual_seed(0)
    q, k, v, mix = (
        torch.randn(sum(lengths), n, heads[2], generator=generator) for n in (*heads[:2], heads[1], heads[0])
    )
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    half = [x.to("cuda", torch.bfloat16).requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().cpu().requires_grad_() for x in half]
    out = attention(half[0], half[1], half[2], cu.cuda(), max(lengths), causal=causal)
    expected = naive_attention(exact[0], exact[1], exact[2], lengths, causal)
    assert distance(out.double().cpu(), expected) <= 2 * BFLOAT16_STEP
    ours = torch.autograd.grad((out * mix.cuda().bfloat16()).sum(), half)
    theirs = torch.autograd.grad((expected * mix.bfloat16().double()).sum(), exact)
    for a, b in zip(ours, theirs, strict=True):
        assert distance(a.double().cpu(), b) <= 4 * BFLOAT16_STEP


def test_the_half_precision_head_accumulates_in_float32() -> None:
    hidden, weight, target, early = inputs(torch.bfloat16)
    scoring = Scoring(target.cuda(), target.cuda(), 0.7, (36,), (33, 34), early.cuda(), True)
    on_gpu = [x.cuda().requires_grad_() for x in (hidden, weight)]
    exact = [x.double().requires_grad_() for x in (hidden, weight)]
    found = segment_scores(on_gpu[0], on_gpu[1], scoring, chunk=7)
    expected = naive_scores(exact[0], exact[1], Scoring(target, target, 0.7, (36,), (33, 34), early, True))
    assert found.entropy_R is not None
    assert distance(found.logp_R.double().cpu(), expected[0]) <= 1e-5
    assert distance(found.entropy_R.double().cpu(), expected[1]) <= 1e-5
    ours = torch.autograd.grad(found.logp_R.sum() + found.entropy_R.sum(), on_gpu)
    theirs = torch.autograd.grad(expected[0].sum() + expected[1].sum(), exact)
    for a, b in zip(ours, theirs, strict=True):
        assert distance(a.double().cpu(), b) <= 2 * BFLOAT16_STEP


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 3e-2)])
def test_the_model_on_a_gpu(tmp_path: Path, rng: np.random.Generator, dtype: str, tolerance: float) -> None:
    path = saved(vlm(Shape(hidden=64, section=(2, 3, 3))).to(torch.bfloat16), tmp_path)
    exact = Qwen2Model(Qwen2ModelArgs.from_pretrained(path, dtype="float64"))
    model = Qwen2Model(Qwen2ModelArgs.from_pretrained(path, dtype=dtype)).to("cuda")
    documents = [document(rng, 5, (1, 4, 6), 7), document(rng, 9), document(rng, 3, (1, 10, 12), 4)]
    grids = [g for d in documents for g in d.grids]
    packed = pack(documents, pixels(rng, grids, torch.float64))
    rows = torch.tensor([14, 15, 22, 28])
    scoring = Scoring(rows, packed.input_ids_T[rows + 1], 0.8, (IMAGE, VIDEO), (2,), rows > 15, True)
    packed = replace(packed, scoring=scoring, visual_row_M=torch.arange(36))
    losses = []
    for each, batch in ((exact, packed), (model, packed.to("cuda"))):
        scores = each(batch).scores
        assert scores is not None and scores.entropy_R is not None
        (scores.logp_R.sum() + scores.entropy_R.sum()).backward()
        losses.append(scores.logp_R.detach().double().cpu())
    assert distance(losses[1], losses[0]) <= tolerance
    for (name, a), b in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        ours, theirs = a.grad.double().cpu(), b.grad
        assert (ours - theirs).norm() / theirs.norm() <= 3 * tolerance, name


@pytest.fixture
def deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic_algorithms")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_algorithms_give_the_same_bits(tmp_path: Path, rng: np.random.Generator, dtype: str) -> None:
    path = saved(vlm(Shape(hidden=64, section=(2, 3, 3))).to(torch.bfloat16), tmp_path)
    model = Qwen2Model(Qwen2ModelArgs.from_pretrained(path, dtype=dtype)).to("cuda")
    documents = [document(rng, 5, (1, 40, 60), 700), document(rng, 1900), document(rng, 30, (1, 10, 12), 400)]
    packed = pack(documents, pixels(rng, [g for d in documents for g in d.grids], torch.float64))
    rows = torch.arange(605, 1300)
    scoring = Scoring(rows, packed.input_ids_T[rows + 1], 0.8, (IMAGE, VIDEO), (2,), rows > 1290, True)
    batch = replace(packed, scoring=scoring, visual_row_M=torch.arange(600 + 30)).to("cuda")
    found = []
    for _ in range(3):
        model.zero_grad()
        scores = model(batch).scores
        assert scores is not None and scores.entropy_R is not None
        (scores.logp_R.sum() + scores.entropy_R.sum()).backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append([scores.logp_R.detach().clone(), *gradients])
    for again in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], again, strict=True))
