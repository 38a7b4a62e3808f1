"""Rewards of whole samples into advantages of tokens.

Owns the order overlong penalty → bias, scaling, clip → reward_norm → KL per token → advantages → adv_norm, and nothing
of the loss. Groups are carried by id: neither order nor equal sizes matter. Everything is computed in float64.
Shapes: S samples of the batch, R loss tokens (rows) of this rank, each belonging to one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Level = Literal["batch", "group"] | None


class RewardError(ValueError):
    """Rewards that cannot be normalised as the configuration asks."""


@dataclass(frozen=True)
class Normalisation:
    """(x − mean) / (std + eps), each over the batch, over the group, or not at all."""

    mean_level: Level = "batch"
    std_level: Level = "batch"
    mean_leave1out: bool = False
    std_unbiased: bool = True
    eps: float = 1e-5

    @classmethod
    def from_config(cls, section: Any) -> Normalisation | None:
        """Of `actor.reward_norm` or `actor.adv_norm`; None stays None."""
        if section is None:
            return None
        return cls(
            section.mean_level, section.std_level, section.mean_leave1out, section.std_unbiased, float(section.eps)
        )


@dataclass(frozen=True)
class Shaping:
    """What happens to the reward of a sample before it is normalised."""

    bias: float = 0.0
    scaling: float = 1.0
    clip: float = 20.0
    overlong_tokens: int | None = None  # None: no penalty
    overlong_penalty_factor: float = 1.0
    max_new_tokens: int = 0

    @classmethod
    def from_config(cls, actor: Any, max_new_tokens: int) -> Shaping:
        """Of the section `actor`, with the length limit that generation had."""
        overlong = actor.overlong_tokens if actor.overlong_reward_penalty else None
        factor = 1.0 if actor.overlong_penalty_factor is None else float(actor.overlong_penalty_factor)
        return cls(
            actor.reward_bias, actor.reward_scaling, actor.reward_clip, overlong, factor, max_new_tokens=max_new_tokens
        )


def group_index(groups: Sequence[str]) -> Tensor:
    """Index of each sample's group, numbered in order of appearance."""
    seen: dict[str, int] = {}
    return torch.tensor([seen.setdefault(group, len(seen)) for group in groups], dtype=torch.int64)


def shape_rewards(reward_S: Tensor, response_tokens_S: Tensor, shaping: Shaping) -> Tensor:
    """Overlong penalty, then (r + bias)·scaling, then the clip."""
    reward_S = reward_S.double()
    if shaping.overlong_tokens:
        start = shaping.max_new_tokens - shaping.overlong_tokens
        over_S = (response_tokens_S.double() - start).clamp(0, shaping.overlong_tokens)
        reward_S = reward_S - over_S / shaping.overlong_tokens * shaping.overlong_penalty_factor
    return ((reward_S + shaping.bias) * shaping.scaling).clamp(-shaping.clip, shaping.clip)


def normalise_rewards(reward_S: Tensor, group_S: Tensor, norm: Normalisation | None) -> Tensor:
    """Normalised rewards; with a group mean, a group of equal rewards comes out as exactly 0."""
    reward_S = reward_S.double()
    if norm is None:
        return reward_S
    ones_S = torch.ones_like(reward_S)
    normal_S = _normalise(Moments(ones_S, reward_S, torch.zeros_like(reward_S)), reward_S, group_S, norm)
    if norm.mean_level == "group":
        normal_S = torch.where(equal_groups(reward_S, group_S)[group_S], torch.zeros_like(normal_S), normal_S)
    return normal_S


def sample_outcomes(
    reward_S: Tensor,
    response_tokens_S: Tensor,
    truncated_S: Tensor,
    group_S: Tensor,
    *,
    shaping: Shaping,
    norm: Normalisation | None,
    mask_truncated: bool,
) -> Tensor:
    """What each answer earned, shaped and normalised; `mask_truncated` (mask_no_eos_with_zero) zeroes cut answers."""
    outcome_S = normalise_rewards(shape_rewards(reward_S, response_tokens_S, shaping), group_S, norm)
    return torch.where(truncated_S, torch.zeros_like(outcome_S), outcome_S) if mask_truncated else outcome_S


def equal_groups(reward_S: Tensor, group_S: Tensor) -> Tensor:
    """Per group: are all its rewards the same number."""
    count = int(group_S.max()) + 1 if len(group_S) else 0
    low = reward_S.new_zeros(count).scatter_reduce(0, group_S, reward_S, "amin", include_self=False)
    high = reward_S.new_zeros(count).scatter_reduce(0, group_S, reward_S, "amax", include_self=False)
    return low == high


def kl_penalty(logp_R: Tensor, ref_R: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(π‖ref) per token, x = log π/ref: k1 = x, k2 = x²/2, k3 = e^−x − 1 + x."""
    diff_R = logp_R.double() - ref_R.double()
    if estimator == "k1":
        return diff_R
    if estimator == "k2":
        return diff_R.square() / 2
    if estimator == "k3":
        return torch.expm1(-diff_R) + diff_R
    raise RewardError(f"actor.kl_estimator: {estimator!r} is none of k1, k2, k3")


def token_advantages(
    outcome_S: Tensor,
    length_S: Tensor,
    *,
    kl_R: Tensor | None = None,
    kl_ctl: float = 0.0,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
) -> Tensor:
    """Advantage of every token, sample after sample: the outcome falls on the last token, −kl_ctl·KL on each.

    There is no critic: values are 0, so A_t = r_t + discount·gae_lambda·A_{t+1}.
    """
    decay = discount * gae_lambda
    parts = []
    start = 0
    for outcome, length in zip(outcome_S.double().tolist(), length_S.tolist(), strict=True):
        if kl_R is None or kl_ctl == 0.0:
            parts.append(outcome * decay ** torch.arange(length - 1, -1, -1, dtype=torch.float64))
        else:
            reward_t = -kl_ctl * kl_R[start : start + length].double().cpu()
            reward_t[-1:] += outcome
            parts.append(_discounted(reward_t, decay))
        start += length
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True)
class Moments:
    """Count, mean and summed squared deviation of each sample's tokens: what adv_norm must know of other ranks."""

    count_S: Tensor
    mean_S: Tensor
    spread_S: Tensor

    @classmethod
    def of_tokens(cls, value_R: Tensor, sample_R: Tensor, samples: int) -> Moments:
        """Moments per sample; samples of other ranks have count 0."""
        value_R = value_R.double()
        count_S = torch.zeros(samples, dtype=torch.float64).index_add(0, sample_R, torch.ones_like(value_R))
        mean_S = torch.zeros_like(count_S).index_add(0, sample_R, value_R) / count_S.clamp(min=1)
        spread_S = torch.zeros_like(count_S).index_add(0, sample_R, (value_R - mean_S[sample_R]).square())
        return cls(count_S, mean_S, spread_S)


def normalise_advantages(
    advantage_R: Tensor,
    sample_R: Tensor,
    group_S: Tensor,
    norm: Normalisation | None,
    all_reduce: Callable[[Tensor], Tensor] = lambda summed: summed,
) -> Tensor:
    """adv_norm over the loss tokens of the whole batch, of which this rank holds some samples.

    `all_reduce` sums a float64 tensor over the data-parallel ranks (each sample lies on one of them).
    """
    if norm is None:
        return advantage_R
    own = Moments.of_tokens(advantage_R, sample_R, len(group_S))
    moments = Moments(*all_reduce(torch.stack([own.count_S, own.mean_S, own.spread_S])).unbind())
    return _normalise(moments, advantage_R.double(), group_S, norm, sample_R)


def _normalise(
    moments: Moments, value_X: Tensor, group_S: Tensor, norm: Normalisation, sample_X: Tensor | None = None
) -> Tensor:
    """Normalises values (X: samples, or tokens with the sample of each) by moments taken over samples."""
    groups = int(group_S.max()) + 1 if len(group_S) else 0
    group_X = group_S if sample_X is None else group_S[sample_X]
    batch_S, batch_X = torch.zeros_like(group_S), torch.zeros_like(group_X)
    if norm.mean_level is None:
        centred_X = value_X
    else:
        over_S, over_X, n = (batch_S, batch_X, 1) if norm.mean_level == "batch" else (group_S, group_X, groups)
        count_G, mean_G, _ = _combine(moments, over_S, n)
        centred_X = value_X - mean_G[over_X]
        if norm.mean_leave1out:
            if bool((count_G < 2).any()):
                raise RewardError("mean_leave1out needs at least 2 values: raise gconfig.n_samples or drop it")
            # x − mean of the others = (x − mean)·n/(n − 1)
            centred_X = centred_X * (count_G / (count_G - 1))[over_X]
    if norm.std_level is None:
        return centred_X
    over_S, over_X, n = (batch_S, batch_X, 1) if norm.std_level == "batch" else (group_S, group_X, groups)
    count_G, _, spread_G = _combine(moments, over_S, n)
    if bool((count_G < 2).any()):
        raise RewardError(f"the standard deviation of one value ({norm.std_level} level): raise gconfig.n_samples")
    std_G = (spread_G / (count_G - 1 if norm.std_unbiased else count_G)).sqrt()
    return centred_X / (std_G + norm.eps)[over_X]


def _combine(moments: Moments, over_S: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and summed squared deviation of sets of samples from those of each sample (Chan)."""
    zero_G = torch.zeros(n, dtype=torch.float64)
    count_G = zero_G.index_add(0, over_S, moments.count_S)
    mean_G = zero_G.index_add(0, over_S, moments.count_S * moments.mean_S) / count_G.clamp(min=1)
    between_S = moments.count_S * (moments.mean_S - mean_G[over_S]).square()
    return count_G, mean_G, zero_G.index_add(0, over_S, moments.spread_S + between_S)


def _discounted(reward_t: Tensor, decay: float) -> Tensor:
    if decay == 1.0:
        return reward_t.flip(0).cumsum(0).flip(0)
    total, out = 0.0, []
    for reward in reversed(reward_t.tolist()):
        total = reward + decay * total
        out.append(total)
    return torch.tensor(out[::-1], dtype=torch.float64)
