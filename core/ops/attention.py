"""Attention inside the documents of one packed stream.

Owns one function, and its form for spans of queries, with two backends: FlashAttention's varlen kernel on CUDA in half
precision, and everywhere else dense attention over documents of (near) equal length at once. Knows no cache, no rope
and no parallelism.
Shapes: T tokens, Q queries, K keys, H heads, d head width, B documents of a batch, L their length.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

# Padding a causal batch costs arithmetic and saves calls: up to this share of the padded tokens may be empty.
MAX_PADDING = 0.25
# The varlen kernel takes fewer key heads by an argument (2.13) or as they are (2.11: seen right in both directions).
_ASKS = "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters


def attention(
    q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, causal: bool
) -> Tensor:
    """Softmax attention of every token within its document, scaled by d^-0.5; k and v may have fewer heads."""
    if q_THd.is_cuda and q_THd.dtype in (torch.bfloat16, torch.float16):
        window = (-1, 0) if causal else (-1, -1)
        return _varlen(q_THd, k_THd, v_THd, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window)
    lengths = tuple(torch.diff(cu_seqlens).tolist())
    batches = _batches(lengths, causal)
    if len(batches) == 1 and batches[0].whole:
        return _dense(q_THd, k_THd, v_THd, batches[0], causal)
    order = _restore(lengths, causal).to(q_THd.device)
    outs = []
    for batch in batches:
        index = batch.index.to(q_THd.device)
        q, k, v = (x.index_select(0, index) for x in (q_THd, k_THd, v_THd))
        outs.append(_dense(q, k, v, batch, causal))
    return torch.cat(outs).index_select(0, order)


def attention_to(
    q_QHd: Tensor, k_KHd: Tensor, v_KHd: Tensor, cu_q: Tensor, cu_k: Tensor, longest_q: int, longest_k: int
) -> Tensor:
    """Causal attention of spans of queries, each to its own span of keys, whose last key is its last query's token."""
    if q_QHd.is_cuda and q_QHd.dtype in (torch.bfloat16, torch.float16):
        return _varlen(q_QHd, k_KHd, v_KHd, cu_q, cu_k, longest_q, longest_k, (-1, 0))
    outs = []
    for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_QHd[a:b], k_KHd[c:d], v_KHd[c:d]))
        seen = torch.ones(b - a, d - c, dtype=torch.bool, device=q.device).tril(d - c - (b - a))
        gqa = q.shape[1] != k.shape[1]
        outs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=gqa)[0].transpose(0, 1))
    return torch.cat(outs)


def _varlen(
    q_QHd: Tensor,
    k_KHd: Tensor,
    v_KHd: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    longest_q: int,
    longest_k: int,
    window: tuple[int, int],
) -> Tensor:
    more: dict[str, Any] = {"enable_gqa": True} if _ASKS and k_KHd.shape[1] != q_QHd.shape[1] else {}
    o_QHd = varlen.varlen_attn(q_QHd, k_KHd, v_KHd, cu_q, cu_k, longest_q, longest_k, window_size=window, **more)
    assert isinstance(o_QHd, Tensor)  # a tuple only with return_aux
    return o_QHd


def _dense(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, batch: _Batch, causal: bool) -> Tensor:
    shape = (batch.documents, batch.length)
    q, k, v = (x.unflatten(0, shape).transpose(1, 2) for x in (q_THd, k_THd, v_THd))
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=gqa).transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class _Batch:
    """Documents attended to in one dense call; `index` gathers their tokens, padding repeats a last token."""

    documents: int
    length: int
    whole: bool  # the stream itself, in order
    index: Tensor


@lru_cache(maxsize=256)
def _batches(lengths: tuple[int, ...], causal: bool) -> tuple[_Batch, ...]:
    """Documents in order of length, cut into batches. Only causal ones are padded: what follows a token is unseen."""
    present = [(n, i) for i, n in enumerate(lengths) if n > 0]
    if len({n for n, _ in present}) == 1:
        return (_Batch(len(present), present[0][0], True, torch.empty(0, dtype=torch.int64)),)
    starts = torch.cumsum(torch.tensor((0, *lengths)), 0)
    batches: list[_Batch] = []
    group: list[tuple[int, int]] = []
    tokens = 0
    for n, i in sorted(present, reverse=True):
        padded = group[0][0] * (len(group) + 1) if group else n
        if group and (n != group[0][0] if not causal else padded - tokens - n > MAX_PADDING * padded):
            batches.append(_gathered(group, starts))
            group, tokens = [], 0
        group.append((n, i))
        tokens += n
    if group:
        batches.append(_gathered(group, starts))
    return tuple(batches)


def _gathered(group: list[tuple[int, int]], starts: Tensor) -> _Batch:
    length = group[0][0]
    first = starts[torch.tensor([i for _, i in group])]
    last = torch.tensor([n for n, _ in group]) - 1
    within = torch.minimum(torch.arange(length)[None, :], last[:, None])
    return _Batch(len(group), length, False, (first[:, None] + within).flatten())


@lru_cache(maxsize=256)
def _restore(lengths: tuple[int, ...], causal: bool) -> Tensor:
    """Place of every token of the stream in the concatenated output of the batches."""
    place = torch.empty(sum(lengths), dtype=torch.int64)
    index = torch.cat([batch.index for batch in _batches(lengths, causal)])
    real = torch.ones_like(index, dtype=torch.bool)
    real[1:] = index[1:] != index[:-1]  # padding repeats the token before it
    place[index[real]] = torch.arange(index.numel())[real]
    return place
