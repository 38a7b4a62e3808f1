"""Continuous batching: requests join and leave between tokens.

Owns who waits, who runs in which slot, and the forwards of one step (prefill of those that join, one token for the
others). It runs in one thread and knows no clock, no weights and no HTTP; the engine decides when a step is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from core.inference.embedded.prompt_cache import CachedPrompt, PromptCache
from core.inference.embedded.request import ModelTraits, PromptImage, Request
from core.inference.embedded.sampling import Sampler
from core.inference.embedded.slots import Slots
from core.ops.packed import CausalVLM, PackedBatch


class Batch:
    """`deterministic`: one sequence per forward, so that no request's numbers depend on its neighbours."""

    def __init__(
        self,
        model: CausalVLM,
        traits: ModelTraits,
        *,
        max_running: int,
        max_prefill_tokens: int,
        deterministic: bool,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model = model
        self.traits = traits
        self.max_running = max_running
        self.max_prefill_tokens = max_prefill_tokens
        self.deterministic = deterministic
        self.device = device
        self.dtype = dtype
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the request in slot i is running[i]
        self.slots = Slots(max_running, traits.context_length, device)
        self.prompts = PromptCache(4 * max_prefill_tokens)
        self.sampler = Sampler(traits.vocab_size)
        self.prefilled_tokens = 0
        self.sampled_tokens = 0

    def step(self, version: str, *, admit: bool = True) -> list[Request]:
        """Takes in who waits, then samples one token for everyone; returns the requests that changed."""
        joined = self._admit(version) if admit else []
        here = set(map(id, joined))
        changed = list(joined)
        for first, requests in self._decode_calls([r for r in self.running if id(r) not in here]):
            logits_BV = self._decode(first, requests)
            self._sample(logits_BV, requests, version)
            changed += requests
        self._leave()
        return changed

    def retract(self) -> None:
        """All that run wait again, in their order and before the others; their keys and values are forgotten."""
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        self.forget()

    def remove(self, request: Request) -> None:
        """Takes a request out wherever it is."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self._vacate(self.running.index(request))

    def forget(self) -> None:
        """Drops what was computed under the current weights and is not in use."""
        self.prompts.clear()
        if not self.running:
            self.slots.shrink()

    def _admit(self, version: str) -> list[Request]:
        joined: list[Request] = []
        fresh: list[tuple[int, Request]] = []  # (slot, request) that need a forward
        twins: list[tuple[int, Request, Request]] = []  # (slot, request, the fresh one with the same prompt)
        cached: list[tuple[int, Request, CachedPrompt]] = []
        tokens = 0
        while self.waiting and len(self.running) < self.max_running:
            request = self.waiting[0]
            slot = len(self.running)
            first_time = not request.output_ids
            twin = next(
                (r for _, r in fresh if first_time and not r.output_ids and r.prompt.key == request.prompt.key), None
            )
            known = self.prompts.get(request.prompt.key) if first_time and twin is None else None
            if twin is not None:
                twins.append((slot, request, twin))
            elif known is not None:
                cached.append((slot, request, known))
            elif fresh and (self.deterministic or tokens + request.length > self.max_prefill_tokens):
                break
            else:
                fresh.append((slot, request))
                tokens += request.length
            self.waiting.popleft()
            self.running.append(request)
            joined.append(request)
        if joined:
            self._compute(fresh, twins, cached, joined, version)
        return joined

    def _compute(
        self,
        fresh: list[tuple[int, Request]],
        twins: list[tuple[int, Request, Request]],
        cached: list[tuple[int, Request, CachedPrompt]],
        joined: list[Request],
        version: str,
    ) -> None:
        rows: dict[int, Tensor] = {}
        if fresh:
            logits_BV = self._prefill([slot for slot, _ in fresh], [request for _, request in fresh])
            for row, (slot, request) in enumerate(fresh):
                rows[id(request)] = logits_BV[row]
                if not request.output_ids:
                    saved = self.slots.copy_out(slot, request.length)
                    self.prompts.put(request.prompt.key, CachedPrompt(saved, logits_BV[row].clone(), request.length))
                    cached += [
                        (s, r, CachedPrompt(saved, logits_BV[row], r.length)) for s, r, f in twins if f is request
                    ]
        for slot, request, known in cached:
            self.slots.copy_in(slot, known.layers)
            request.cached_tokens = known.length
            rows[id(request)] = known.logits_V
        self._sample(torch.stack([rows[id(request)] for request in joined]), joined, version)

    def _prefill(self, slots: Sequence[int], requests: Sequence[Request]) -> Tensor:
        """Whole sequences through the model; logits of their last tokens."""
        lengths = [request.length for request in requests]
        ends = np.cumsum(lengths)
        cu_seqlens = torch.tensor([0, *ends], dtype=torch.int32)
        images: dict[str, tuple[int, PromptImage]] = {}  # hash -> (first row of the tower's output, image)
        rows: list[np.ndarray] = []
        first_row = 0
        for request in requests:
            for image in request.prompt.images:
                if image.hash not in images:
                    images[image.hash] = (first_row, image)
                    first_row += image.tokens(self.traits.merge)
                start = images[image.hash][0]
                rows.append(np.arange(start, start + image.tokens(self.traits.merge)))
        pixels = np.concatenate([image.patches_PK for _, image in images.values()]) if images else None
        packed = PackedBatch(
            input_ids_T=torch.from_numpy(np.concatenate([_ids(request) for request in requests])),
            position_ids_3T=torch.from_numpy(np.concatenate([_positions(request) for request in requests], axis=1)),
            cu_seqlens=cu_seqlens,
            max_seqlen=max(lengths),
            pixel_values_PK=None if pixels is None else torch.from_numpy(pixels).to(self.dtype),
            grid_thw=tuple(image.grid for _, image in images.values()),
            visual_row_M=torch.from_numpy(np.concatenate(rows)) if rows else None,
            logit_rows_R=torch.from_numpy(ends - 1),
        ).to(self.device)
        self.slots.prefill(slots, lengths, packed.cu_seqlens)
        self.prefilled_tokens += int(ends[-1])
        return self._logits(packed)

    def _decode_calls(self, requests: list[Request]) -> list[tuple[int, list[Request]]]:
        """Runs of neighbouring slots that go through one forward. Those that joined sit behind the others."""
        if not requests:
            return []
        if self.deterministic:
            return [(slot, [request]) for slot, request in enumerate(requests)]
        return [(0, requests)]

    def _decode(self, first: int, requests: list[Request]) -> Tensor:
        before = [request.length - 1 for request in requests]  # the last token has no keys yet
        positions = torch.tensor([b + r.prompt.shift for b, r in zip(before, requests, strict=True)])
        packed = PackedBatch(
            input_ids_T=torch.tensor([request.output_ids[-1] for request in requests]),
            position_ids_3T=positions.expand(3, -1),
            cu_seqlens=torch.arange(len(requests) + 1, dtype=torch.int32),
            max_seqlen=1,
        ).to(self.device)
        self.slots.decode(first, before)
        return self._logits(packed)

    def _logits(self, packed: PackedBatch) -> Tensor:
        logits_RV = self.model(packed, self.slots).logits_RV
        assert logits_RV is not None
        return logits_RV

    def _sample(self, logits_BV: Tensor, requests: list[Request], version: str) -> None:
        alone = 1 if self.deterministic else len(requests)
        for start in range(0, len(requests), alone):
            part = requests[start : start + alone]
            tokens, logprobs = self.sampler.draw(logits_BV[start : start + alone], part)
            for request, token, logprob in zip(part, tokens, logprobs, strict=True):
                request.append(token, logprob, version)
        self.sampled_tokens += len(requests)

    def _leave(self) -> None:
        for slot in reversed(range(len(self.running))):
            if self.running[slot].done:
                self._vacate(slot)

    def _vacate(self, slot: int) -> None:
        """Frees a slot; the last one's sequence moves into it, so that the used ones have no gap."""
        last = len(self.running) - 1
        if slot != last:
            self.slots.move(last, slot, self.running[last].length)
            self.running[slot] = self.running[last]
        self.running.pop()


def _ids(request: Request) -> np.ndarray:
    return np.concatenate([request.prompt.ids, np.asarray(request.output_ids, dtype=np.int64)])


def _positions(request: Request) -> np.ndarray:
    follow = np.arange(len(request.prompt.ids), request.length, dtype=np.int64) + request.prompt.shift
    return np.concatenate([request.prompt.positions_3T, np.tile(follow, (3, 1))], axis=1)
