"""Packed attention equals naive softmax within each document, whatever the lengths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from core.ops.attention import attention
from tests.model.checkpoints import distance


def naive(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], causal: bool) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = owner[:, None] == owner[None, :]
    if causal:
        seen = seen.tril()
    return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def compare(lengths: list[int], causal: bool, heads: int, kv: int) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    q, k, v = (
        torch.randn(total, n, 6, generator=generator, dtype=torch.float64).requires_grad_() for n in (heads, kv, kv)
    )
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    out = attention(q, k, v, cu, max(lengths), causal=causal)
    expected = naive(q, k, v, lengths, causal)
    assert distance(out, expected) <= 1e-12
    mix = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad((out * mix).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * mix).sum(), (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= 1e-12 * max(1.0, b.abs().max().item())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(sum),
    causal=st.booleans(),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]),
)
def test_any_lengths(lengths: list[int], causal: bool, heads: tuple[int, int]) -> None:
    compare(lengths, causal, *heads)


@pytest.mark.parametrize("causal", [False, True])
def test_equal_lengths_and_one_document(causal: bool) -> None:
    compare([8] * 5, causal, 4, 2)
    compare([33], causal, 4, 2)
