"""Scores and their gradients equal float64 autograd of the naive formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.ops.logprob import TargetError, segment_scores
from core.ops.packed import Scoring
from tests.model.checkpoints import distance

V, D, R = 37, 12, 23


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(R, D, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randint(0, V - 6, (R,), generator=generator)
    early = torch.rand(R, generator=generator) < 0.5
    return hidden, weight, target, early


def naive(hidden: Tensor, weight: Tensor, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """All logits, masked by -inf, in the dtype of the inputs."""
    logits = hidden @ weight.T / scoring.temperature
    mask = torch.zeros_like(logits, dtype=torch.bool)
    mask[:, list(scoring.banned)] = True
    if scoring.early_R is not None:
        for token in scoring.banned_early:
            mask[:, token] |= scoring.early_R
    logp = logits.masked_fill(mask, -torch.inf).log_softmax(-1)
    p = logp.exp()
    entropy = -(p * logp.masked_fill(mask, 0.0)).sum(-1)
    return logp.gather(1, scoring.target_R[:, None])[:, 0], entropy


@pytest.mark.parametrize("chunk", [1, 5, None])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("banned", [(), (31, 36)])
@pytest.mark.parametrize("part", ["logp", "entropy", "both"])
def test_scores_and_gradients(chunk: int | None, temperature: float, banned: tuple[int, ...], part: str) -> None:
    hidden, weight, target, early = inputs(torch.float64)
    hidden.requires_grad_()
    weight.requires_grad_()
    scoring = Scoring(target, target, temperature, banned, (33, 34), early, True)
    expected = naive(hidden, weight, scoring)
    found = segment_scores(hidden, weight, scoring, chunk=chunk)
    assert found.entropy_R is not None
    assert distance(found.logp_R, expected[0]) <= 1e-12 and distance(found.entropy_R, expected[1]) <= 1e-12

    mix = torch.randn(2, R, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mix[0 if part == "entropy" else 1] *= part == "both"

    def gradients(logp: Tensor, entropy: Tensor | None) -> tuple[Tensor, ...]:
        assert entropy is not None
        terms = {"logp": (logp * mix[0]).sum(), "entropy": (entropy * mix[1]).sum()}
        loss = terms["logp"] + terms["entropy"] if part == "both" else terms[part]
        return torch.autograd.grad(loss, (hidden, weight))

    for ours, theirs in zip(gradients(*found), gradients(*expected), strict=True):
        assert distance(ours, theirs) <= 1e-12


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-6)])
def test_products_and_sums_are_float32_or_wider(dtype: torch.dtype, tolerance: float) -> None:
    """In bfloat16 the inputs are rounded, the arithmetic on them is not."""
    hidden, weight, target, _ = inputs(dtype)
    found = segment_scores(hidden, weight, Scoring(target, target, 0.7, (36,), with_entropy=True), chunk=4)
    logp, entropy = naive(hidden.double(), weight.double(), Scoring(target, target, 0.7, (36,)))
    assert found.logp_R.dtype == torch.float32 and found.entropy_R is not None
    assert distance(found.logp_R.double(), logp) <= tolerance
    assert distance(found.entropy_R.double(), entropy) <= tolerance


def test_large_logits_stay_finite() -> None:
    hidden, weight, target, early = inputs(torch.float32)
    hidden = (hidden * 1e4).requires_grad_()
    scoring = Scoring(target, target, 1.0, (0, 36), (1,), early, True)
    target[target == 0] = 2
    found = segment_scores(hidden, weight, scoring)
    assert found.entropy_R is not None
    (grad,) = torch.autograd.grad(found.logp_R.sum() + found.entropy_R.sum(), hidden)
    assert found.logp_R[~((target == 1) & early)].isfinite().all() and grad.isfinite().all()
    assert (found.entropy_R >= 0).all()


def test_a_banned_target_scores_minus_infinity() -> None:
    hidden, weight, target, early = inputs(torch.float64)
    target[0], target[1], early[1], target[2], early[2] = 36, 33, True, 33, False
    found = segment_scores(hidden, weight, Scoring(target, target, 1.0, (36,), (33,), early))
    assert found.entropy_R is None
    assert found.logp_R[0] == found.logp_R[1] == -torch.inf and found.logp_R[2].isfinite()


def test_no_rows_are_no_scores() -> None:
    hidden, weight, _, _ = inputs(torch.float32)
    hidden = hidden[:0].requires_grad_()
    weight.requires_grad_()
    none = torch.empty(0, dtype=torch.int64)
    found = segment_scores(hidden, weight, Scoring(none, none))
    assert found.logp_R.shape == (0,)
    found.logp_R.sum().backward()
    assert weight.grad is not None and weight.grad.abs().max() == 0


def test_a_target_outside_the_vocabulary_is_refused() -> None:
    hidden, weight, target, _ = inputs(torch.float32)
    for wrong in (V, -1):
        target[3] = wrong
        with pytest.raises(TargetError, match=rf"leave \[0, {V}\)"):
            segment_scores(hidden, weight, Scoring(target, target))
