"""How a packed stream is laid out on the ranks of a team, and attention across that layout.

Owns context parallelism (who holds which tokens, and the two ways in which queries meet all keys of their document) and
the rows that each tensor-parallel rank holds between regions. Embeddings of images and labels are settled on the whole
stream before any of it. A team of one rank makes everything here the identity.

Split: each document is cut into 2·cp pieces and rank r takes pieces r and 2·cp−1−r, so that causal attention costs the
same everywhere; documents start at different ranks in turn, which evens out the rounding. Every rank then holds N
tokens, the last few being padding that nothing attends to.
Ulysses: an all-to-all turns N tokens of all heads into all T tokens of a share of the heads. All-gather-KV: every rank
keeps its queries and gathers keys and values; no limit on heads.
Shapes: T tokens of the stream, N of this cp rank, S of this cp × tp rank, H heads, d head width, R rows asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from core.ops.attention import attention, attention_to
from core.ops.packed import Output, PackedBatch, Scores, Scoring
from core.parallel import collectives
from core.parallel.collectives import group_rank, group_size
from core.parallel.mesh import Team

STYLES = ("ulysses", "allgather")


class ContextError(ValueError):
    """Heads that cannot be spread over the context-parallel ranks, or an unknown style."""


@dataclass(frozen=True)
class Split:
    """Which tokens each cp rank holds, in order; a pure function of lengths and degrees."""

    tokens: tuple[NDArray[np.int64], ...]  # positions in the stream, per rank
    rows: int  # N: tokens per rank with padding
    owner_T: NDArray[np.int64]
    place_T: NDArray[np.int64]  # where its owner holds the token
    pieces: tuple[tuple[tuple[int, int, int], ...], ...]  # per rank: start of the document, start and end of the piece


@lru_cache(maxsize=256)
def split(lengths: tuple[int, ...], cp: int, multiple: int = 1) -> Split:
    """The split of documents of these lengths; N is rounded up to a multiple."""
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(cp)]
    start = 0
    for number, length in enumerate(lengths):
        edges = [start + length * k // (2 * cp) for k in range(2 * cp + 1)]
        for rank in range(cp):
            k = (rank + number) % cp
            for piece in (k, 2 * cp - 1 - k):
                if edges[piece] < edges[piece + 1]:
                    pieces[rank].append((start, edges[piece], edges[piece + 1]))
        start += length
    tokens = tuple(np.concatenate([np.arange(0), *(np.arange(a, b) for _, a, b in own)]) for own in pieces)
    owner_T, place_T = np.empty(start, dtype=np.int64), np.empty(start, dtype=np.int64)
    for rank, own in enumerate(tokens):
        owner_T[own], place_T[own] = rank, np.arange(len(own))
    most = max(1, *(len(own) for own in tokens))
    return Split(tokens, -(-most // multiple) * multiple, owner_T, place_T, tuple(tuple(own) for own in pieces))


def share_out(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Whole items (images) to ranks: largest first, each to the rank with the least so far; in order within a rank."""
    loads = [0] * ranks
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (loads[r], r))
        loads[rank] += costs[item]
        shares[rank].append(item)
    return [sorted(share) for share in shares]


class Stream:
    """One packed batch as this rank of the team holds it."""

    def __init__(self, packed: PackedBatch, team: Team, style: str) -> None:
        if style not in STYLES:
            raise ContextError(f"cp_style {style!r} is neither of {', '.join(STYLES)}")
        self.packed, self.team, self.style = packed, team, style
        self.tp = team.tp_group
        self.cp_size, self.tp_size = group_size(team.cp), group_size(self.tp)
        self.tokens = packed.input_ids_T.numel()
        self.split: Split | None = None
        self.spans: _Spans | None = None
        self.rows = -(-self.tokens // self.tp_size) * self.tp_size
        if self.cp_size > 1:
            self.split = split(tuple(torch.diff(packed.cu_seqlens).tolist()), self.cp_size, self.tp_size)
            self.rows = self.split.rows
            self.spans = _Spans(self.split, group_rank(team.cp)) if style == "allgather" else None

    def take(self, x: Tensor, dim: int = 0) -> Tensor:
        """The N tokens of this cp rank; padding repeats the first token of the stream."""
        if self.split is not None:
            own = self._padded(self.split.tokens[group_rank(self.team.cp)])
            return x.index_select(dim, own.to(x.device))
        missing = self.rows - self.tokens
        if missing == 0:
            return x
        return torch.cat((x, x.narrow(dim, 0, 1).expand(*[missing if d == dim else -1 for d in range(x.ndim)])), dim)

    def own_rows(self, x_N: Tensor) -> Tensor:
        """The S rows of this tp rank among N."""
        return x_N if self.tp_size == 1 else x_N.chunk(self.tp_size)[group_rank(self.tp)]

    def attend(self, q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor) -> Tensor:
        """Causal attention of this rank's tokens (and heads) to everything before them in their documents."""
        cu_seqlens, longest = self.packed.cu_seqlens, self.packed.max_seqlen
        if self.split is None:
            q_THd, k_THd, v_THd = (x[: self.tokens] for x in (q_NHd, k_NHd, v_NHd))
            return self._pad(attention(q_THd, k_THd, v_THd, cu_seqlens, longest, causal=True))
        return self._attend_across(self.split, q_NHd, k_NHd, v_NHd)

    @torch.compiler.disable  # communicates, and computes where on the host
    def _attend_across(self, split: Split, q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor) -> Tensor:
        if self.style == "allgather":
            return self._gathering(split, q_NHd, k_NHd, v_NHd)
        heads = q_NHd.shape[1]
        q_THd, k_THd, v_THd = self._by_heads(split, q_NHd, k_NHd, v_NHd)
        o_THd = attention(q_THd, k_THd, v_THd, self.packed.cu_seqlens, self.packed.max_seqlen, causal=True)
        o_CNHd = torch.stack([o_THd.index_select(0, self._padded(own).to(o_THd.device)) for own in split.tokens])
        o_NCHd = collectives.swap(o_CNHd, self.team.cp).transpose(0, 1)
        return o_NCHd.reshape(self.rows, heads, -1)

    def asked(self, row_R: Tensor | None) -> Asked:
        """Who answers for which rows of the stream; None asks for all."""
        if self.split is None:
            return Asked(self, row_R)
        rows = np.arange(self.tokens) if row_R is None else row_R.cpu().numpy()
        owner_R = self.split.owner_T[rows]
        counts = np.bincount(owner_R, minlength=self.cp_size)
        most = int(counts.max())
        place_R = np.empty(len(rows), dtype=np.int64)
        for rank in range(self.cp_size):
            place_R[owner_R == rank] = rank * most + np.arange(counts[rank])
        mine = np.flatnonzero(owner_R == group_rank(self.team.cp))
        device = self.packed.input_ids_T.device
        held_r, mine_r, place = (
            torch.from_numpy(x).to(device) for x in (self.split.place_T[rows[mine]], mine, place_R)
        )
        return Asked(self, held_r, mine_r, place, most)

    def _by_heads(self, split: Split, *projected: Tensor) -> list[Tensor]:
        """All T tokens of this rank's share of the heads of q, k and v."""
        ranks = self.cp_size
        shared = []
        for x_NHd in projected:
            heads = x_NHd.shape[1]
            if heads % ranks and ranks % heads:
                raise ContextError(f"{heads} heads of a rank neither divide nor repeat over c={ranks}; use allgather")
            repeated = x_NHd if heads % ranks == 0 else x_NHd.repeat_interleave(ranks // heads, dim=1)
            shared.append(repeated.unflatten(1, (ranks, -1)))
        widths = [x_NChd.shape[2] for x_NChd in shared]
        sent_CNhd = torch.cat(shared, dim=2).transpose(0, 1)
        found_Mhd = collectives.swap(sent_CNhd, self.team.cp).flatten(0, 1)
        return list(found_Mhd.index_select(0, self._stream_order(split, found_Mhd.device)).split(widths, dim=1))

    def _gathering(self, split: Split, q_NHd: Tensor, k_NHd: Tensor, v_NHd: Tensor) -> Tensor:
        spans = self.spans
        assert spans is not None
        heads = k_NHd.shape[1]
        kv_Mhd = collectives.gather_sum(torch.cat((k_NHd, v_NHd), dim=1), self.team.cp)
        if not spans.queries:  # padding only: the others still wait for the gradient of what they sent
            return 0.0 * (q_NHd + kv_Mhd.sum())
        order_T = self._stream_order(split, kv_Mhd.device)
        wanted = order_T.index_select(0, spans.key_K.to(order_T.device))
        k_KHd, v_KHd = kv_Mhd.index_select(0, wanted).split(heads, dim=1)
        cu_q, cu_k = (cu.to(q_NHd.device) for cu in (spans.cu_q, spans.cu_k))
        o_THd = attention_to(q_NHd[: spans.queries], k_KHd, v_KHd, cu_q, cu_k, spans.longest_q, spans.longest_k)
        return self._pad(o_THd)

    def _stream_order(self, split: Split, device: torch.device) -> Tensor:
        """Row of each token of the stream in what a gather over cp gives."""
        return torch.from_numpy(split.owner_T * self.rows + split.place_T).to(device)

    def _padded(self, own: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.pad(own, (0, self.rows - len(own))))

    def _pad(self, x_THd: Tensor) -> Tensor:
        missing = self.rows - x_THd.shape[0]
        return x_THd if missing == 0 else F.pad(x_THd, (0, 0, 0, 0, 0, missing))


@dataclass(frozen=True)
class Asked:
    """Rows whose logits or scores are wanted: those that this cp rank holds, and how all come together."""

    stream: Stream
    held_r: Tensor | None  # place of each among the N tokens here; None: all tokens
    mine_r: Tensor | None = None  # its number among the R rows asked for; None: all of them are here
    place_R: Tensor | None = None  # where each of the R answers lies in what a gather over cp gives
    most: int = 0  # rows of the rank that holds most of them

    def hidden(self, hidden_SD: Tensor) -> Tensor:
        """Hidden of the rows held here, the same on all tp ranks."""
        hidden_ND = collectives.gather(hidden_SD, self.stream.tp, dim=0)
        if self.held_r is None:
            return hidden_ND[: self.stream.tokens]
        return hidden_ND.index_select(0, self.held_r)

    def scoring(self, scoring: Scoring | None) -> Scoring | None:
        """What to score of the rows held here."""
        if scoring is None or self.mine_r is None:
            return scoring
        early_R = scoring.early_R
        return scoring._replace(
            target_R=scoring.target_R[self.mine_r], early_R=None if early_R is None else early_R[self.mine_r]
        )

    def output(self, found: Tensor | Scores) -> Output:
        """The answers of all rows, on every rank of the team."""
        if isinstance(found, Tensor):
            return Output(self._together(found), None)
        entropy_R = None if found.entropy_R is None else self._together(found.entropy_R)
        return Output(None, Scores(self._together(found.logp_R), entropy_R))

    def _together(self, value_r: Tensor) -> Tensor:
        if self.place_R is None:
            return value_r
        padded = F.pad(value_r, (0, 0) * (value_r.ndim - 1) + (0, self.most - value_r.shape[0]))
        return collectives.gather(padded, self.stream.team.cp, dim=0).index_select(0, self.place_R)


class _Spans:
    """For all-gather-KV: the pieces of this rank as queries, and the keys that each of them sees."""

    def __init__(self, split: Split, rank: int) -> None:
        pieces = split.pieces[rank]
        lengths_q, lengths_k = [b - a for _, a, b in pieces], [b - start for start, _, b in pieces]
        self.queries = sum(lengths_q)
        self.key_K = torch.from_numpy(np.concatenate([np.arange(0), *(np.arange(start, b) for start, _, b in pieces)]))
        self.cu_q, self.cu_k = (torch.tensor([0, *np.cumsum(x)], dtype=torch.int32) for x in (lengths_q, lengths_k))
        self.longest_q, self.longest_k = max(lengths_q, default=0), max(lengths_k, default=0)
