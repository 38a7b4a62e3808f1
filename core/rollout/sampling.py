"""How answers are sampled, as a server is told it: pure functions of the configuration.

Owns the mapping from `gconfig` to SGLang's sampling_params, so that the distribution sampled from is the one that the
trainer scores (DESIGN, "One distribution").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

from core.config.generation import Generation as GenerationConfig

BANNED = -1e9
_NO_TOP_K = 100_000_000


def sampling_params(
    generation: GenerationConfig, *, prompt_length: int, stop_ids: Sequence[int], banned: Sequence[int]
) -> dict[str, Any]:
    """All but the seed, for a prompt of so many expanded ids."""
    params: dict[str, Any] = {
        "temperature": 0.0 if generation.greedy else generation.temperature,
        "max_new_tokens": max(min(generation.max_new_tokens, generation.max_tokens - prompt_length), 0),
        "min_new_tokens": generation.min_new_tokens,
        "stop_token_ids": sorted({*stop_ids, *generation.stop_token_ids}),
        "ignore_eos": generation.ignore_eos,
        "skip_special_tokens": generation.skip_special_tokens,
        "logit_bias": {str(token): BANNED for token in banned},
    }
    if generation.ignore_eos:
        params["stop_token_ids"] = sorted(generation.stop_token_ids)
    if generation.top_p < 1.0:
        params["top_p"] = generation.top_p
    if 0 < generation.top_k < _NO_TOP_K:
        params["top_k"] = generation.top_k
    if generation.frequency_penalty:
        params["frequency_penalty"] = generation.frequency_penalty
    if generation.stop:
        params["stop"] = list(generation.stop)
    return params


def sampling_seed(seed: int, epoch: int, prompt_id: str, sample: int) -> int:
    """31 bits, the same for the same sample of the same run whatever else is in flight."""
    return xxhash.xxh3_64_intdigest(f"{seed}/{epoch}/{prompt_id}/{sample}".encode()) & 0x7FFFFFFF


def continued(params: dict[str, Any], done: int) -> dict[str, Any]:
    """For the rest of an answer of which `done` tokens are there."""
    return {
        **params,
        "max_new_tokens": params["max_new_tokens"] - done,
        "min_new_tokens": max(params["min_new_tokens"] - done, 0),
    }
