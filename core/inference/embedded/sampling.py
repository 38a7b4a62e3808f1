"""One token per row of logits, and its log-probability under the distribution that it was drawn from.

Owns masks, temperature, truncation and the draw. The draw is keyed by (seed, position) alone: batching, order and
restarts do not change it. Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from core.inference.embedded.request import Request


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments only."""
    data = struct.pack("<QQ", seed & (2**64 - 1), position)
    return (int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 11) * 2.0**-53


class Sampler:
    """Keeps the additive masks of the requests in flight, so that a step adds one tensor."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._masks: dict[tuple, Tensor] = {}

    def draw(self, logits_BV: Tensor, requests: Sequence[Request]) -> tuple[list[int], list[float]]:
        """Token and log-probability for each row. Greedy rows report the untempered, masked distribution's."""
        wide = torch.promote_types(logits_BV.dtype, torch.float32)
        scaled_BV = logits_BV.to(wide) + self._mask(requests, logits_BV.device, wide)
        temperatures = [request.sampling.temperature or 1.0 for request in requests]
        if any(temperature != 1.0 for temperature in temperatures):
            scaled_BV = scaled_BV / torch.tensor(temperatures, dtype=wide, device=scaled_BV.device)[:, None]
        scaled_BV = _truncate(scaled_BV, requests)
        logp_BV = torch.log_softmax(scaled_BV, dim=-1)
        token_B = torch.argmax(logp_BV, dim=-1)
        random = [row for row, request in enumerate(requests) if request.sampling.temperature > 0]
        if random:
            numbers = [uniform(requests[row].sampling.seed, requests[row].length) for row in random]
            if len(random) == len(requests):
                token_B = _inverse(logp_BV, numbers, token_B)
            else:
                rows = torch.tensor(random, device=logp_BV.device)
                token_B[rows] = _inverse(logp_BV[rows], numbers, token_B[rows])
        logp_B = logp_BV.gather(1, token_B[:, None])[:, 0]
        return token_B.tolist(), logp_B.tolist()

    def _mask(self, requests: Sequence[Request], device: torch.device, dtype: torch.dtype) -> Tensor:
        """[V] where all rows have the same, else [B, V]; added to logits."""
        keys = [_mask_key(request) for request in requests]
        if len(self._masks) > 256:
            self._masks.clear()
        for key, request in zip(keys, requests, strict=True):
            if key not in self._masks:
                self._masks[key] = self._build(request).to(device=device, dtype=dtype)
        if len(set(keys)) == 1:
            return self._masks[keys[0]]
        return torch.stack([self._masks[key] for key in keys])

    def _build(self, request: Request) -> Tensor:
        mask_V = torch.zeros(self.vocab_size, dtype=torch.float64)
        for token, bias in request.sampling.bias:
            mask_V[token] = bias
        never = set(request.sampling.banned)
        if request.early:
            never |= request.sampling.stop_token_ids
        mask_V[sorted(never)] = -torch.inf
        return mask_V


def _mask_key(request: Request) -> tuple:
    sampling = request.sampling
    return (sampling.banned, sampling.bias, sampling.stop_token_ids if request.early else None)


def _inverse(logp_BV: Tensor, numbers: Sequence[float], fallback_B: Tensor) -> Tensor:
    """The token at which the cumulated probability passes the number; in float64, so that no token is out of reach."""
    cumulated_BV = torch.cumsum(logp_BV.double().exp(), dim=-1)
    wanted_B1 = torch.tensor(numbers, dtype=torch.float64, device=logp_BV.device)[:, None] * cumulated_BV[:, -1:]
    token_B = torch.searchsorted(cumulated_BV, wanted_B1, right=True)[:, 0].clamp_(max=logp_BV.shape[1] - 1)
    possible_B = logp_BV.gather(1, token_B[:, None])[:, 0] > -torch.inf
    return torch.where(possible_B, token_B, fallback_B)


def _truncate(scaled_BV: Tensor, requests: Sequence[Request]) -> Tensor:
    """top_k, then top_p of what is left: the rest at -inf, so that log-probabilities are those of the truncated one."""
    cut = [
        row
        for row, request in enumerate(requests)
        if request.sampling.temperature > 0 and (request.sampling.top_p < 1.0 or request.sampling.top_k > 0)
    ]
    if not cut:
        return scaled_BV
    scaled_BV = scaled_BV.clone()
    for row in cut:
        sampling = requests[row].sampling
        ordered_V, order_V = torch.sort(scaled_BV[row], descending=True, stable=True)
        drop_V = torch.zeros_like(ordered_V, dtype=torch.bool)
        if sampling.top_k > 0:
            drop_V[sampling.top_k :] = True
        if sampling.top_p < 1.0:
            p_V = torch.softmax(ordered_V.masked_fill(drop_V, -torch.inf), dim=-1)
            drop_V |= torch.cumsum(p_V, dim=-1) - p_V > sampling.top_p
        drop_V[0] = False
        scaled_BV[row, order_V[drop_V]] = -torch.inf
    return scaled_BV
