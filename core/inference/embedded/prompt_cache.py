"""Prompts computed under the current weights, so that a group's samples share one forward.

Owns copies of keys, values and last logits by prompt key, least recently used first out. Whoever changes the weights
clears it: nothing in it outlives a version.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor

from core.inference.embedded.slots import Pair


@dataclass(frozen=True)
class CachedPrompt:
    layers: list[Pair]
    logits_V: Tensor
    length: int


class PromptCache:
    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.hits = 0
        self._entries: OrderedDict[bytes, CachedPrompt] = OrderedDict()
        self._tokens = 0

    def get(self, key: bytes) -> CachedPrompt | None:
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
            self.hits += 1
        return found

    def put(self, key: bytes, entry: CachedPrompt) -> None:
        if key in self._entries or entry.length > self.max_tokens:
            return
        self._entries[key] = entry
        self._tokens += entry.length
        while self._tokens > self.max_tokens:
            self._tokens -= self._entries.popitem(last=False)[1].length

    def clear(self) -> None:
        self._entries.clear()
        self._tokens = 0

    def __len__(self) -> int:
        return len(self._entries)
