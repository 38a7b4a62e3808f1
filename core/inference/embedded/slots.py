"""Keys and values of the sequences in flight, one slot each.

Owns the cache's memory and attention over it. Slots 0 … n-1 are in use, without gaps, so that decoding reads a view;
who sits in which slot is the batch's affair. Memory grows with the longest sequence and the number of slots, up to
what the context and max_running_requests allow.
Shapes: T tokens, B sequences, S slots, L places, H heads, K kv heads, d width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from core.ops.attention import attention

Pair = tuple[Tensor, Tensor]


class Slots:
    """Implements core.ops.packed.KVCache; `prefill` or `decode` says before each forward what its tokens are."""

    def __init__(self, max_slots: int, max_length: int, device: torch.device) -> None:
        self.max_slots = max_slots
        self.max_length = max_length
        self.device = device
        self._layers: dict[int, Pair] = {}  # each [S, K, L, d]
        self._slots = 0
        self._places = 0
        self._rows: Tensor | None = None
        self._columns: Tensor | None = None
        self._cu_seqlens: Tensor | None = None
        self._max_seqlen = 0
        self._window = slice(0, 0)
        self._reach = 0
        self._mask_B11L: Tensor | None = None

    def prefill(self, slots: Sequence[int], lengths: Sequence[int], cu_seqlens: Tensor) -> None:
        """The next forward holds whole sequences, end to end."""
        self._reserve(max(slots) + 1, max(lengths))
        self._rows = torch.repeat_interleave(torch.tensor(slots), torch.tensor(lengths)).to(self.device)
        self._columns = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
        self._cu_seqlens = cu_seqlens
        self._max_seqlen = max(lengths)

    def decode(self, first: int, lengths: Sequence[int]) -> None:
        """The next forward holds one token for each of the slots from `first` on, which have these lengths so far."""
        last = first + len(lengths)
        self._reach = max(lengths) + 1
        self._reserve(last, self._reach)
        self._cu_seqlens = None
        self._window = slice(first, last)
        self._rows = torch.arange(first, last, device=self.device)
        self._columns = torch.tensor(lengths, device=self.device)
        shortest = min(lengths) + 1
        self._mask_B11L = None
        if shortest < self._reach:
            place_L = torch.arange(self._reach, device=self.device)
            self._mask_B11L = (place_L <= self._columns[:, None])[:, None, None, :]

    def attend(self, layer: int, q_THd: Tensor, k_THd: Tensor, v_THd: Tensor) -> Tensor:
        """Stores the new keys and values and attends to all of the sequence's."""
        assert self._rows is not None and self._columns is not None
        keys, values = self._layer(layer, k_THd)
        keys[self._rows, :, self._columns] = k_THd
        values[self._rows, :, self._columns] = v_THd
        if self._cu_seqlens is not None:
            return attention(q_THd, k_THd, v_THd, self._cu_seqlens, self._max_seqlen, causal=True)
        k_BKLd, v_BKLd = keys[self._window, :, : self._reach], values[self._window, :, : self._reach]
        # the query heads of one kv head are as many queries at the same place: nothing is repeated
        q_BKGd = q_THd.unflatten(1, (k_THd.shape[1], -1))
        return F.scaled_dot_product_attention(q_BKGd, k_BKLd, v_BKLd, attn_mask=self._mask_B11L).flatten(1, 2)

    def move(self, source: int, target: int, length: int) -> None:
        for pair in self._layers.values():
            for cache in pair:
                cache[target, :, :length] = cache[source, :, :length]

    def copy_out(self, slot: int, length: int) -> list[Pair]:
        return [
            (k[slot, :, :length].clone(), v[slot, :, :length].clone()) for _, (k, v) in sorted(self._layers.items())
        ]

    def copy_in(self, slot: int, saved: Sequence[Pair]) -> None:
        length = saved[0][0].shape[1]
        self._reserve(slot + 1, length)
        for layer, (k_KLd, v_KLd) in enumerate(saved):
            keys, values = self._layers[layer]
            keys[slot, :, :length] = k_KLd
            values[slot, :, :length] = v_KLd

    def shrink(self) -> None:
        """Gives the memory back; only while no slot is in use."""
        self._layers.clear()
        self._slots = self._places = 0

    @property
    def bytes(self) -> int:
        return sum(cache.numel() * cache.element_size() for pair in self._layers.values() for cache in pair)

    def _reserve(self, slots: int, length: int) -> None:
        if slots <= self._slots and length <= self._places:
            return
        if slots > self._slots:
            self._slots = min(self.max_slots, max(slots, 2 * self._slots, 8))
        if length > self._places:
            self._places = min(self.max_length, max(length, 2 * self._places, 64))
        for layer, pair in self._layers.items():
            self._layers[layer] = (self._grown(pair[0]), self._grown(pair[1]))

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(self._slots, old.shape[1], self._places, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def _layer(self, layer: int, k_THd: Tensor) -> Pair:
        if layer not in self._layers:
            shape = (self._slots, k_THd.shape[1], self._places, k_THd.shape[2])
            self._layers[layer] = (k_THd.new_zeros(shape), k_THd.new_zeros(shape))
        return self._layers[layer]
