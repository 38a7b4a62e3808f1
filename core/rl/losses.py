"""The policy loss of GRPO/PPO in its decoupled form, and the loss of supervised tokens.

Owns the value of one micro-batch's loss, already divided by the loss tokens of the global minibatch, and what is
counted of it; it computes neither log-probabilities nor advantages.
L = −(1/N) Σ_t sg(w)·1[w ≤ cap]·J with w = π_prox/μ.
Shapes: R loss tokens of a micro-batch, S samples of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

IMP_WEIGHT_MODES = ("token_mask", "token_truncate", "sequence_mask", "sequence_truncate", "disabled")


@dataclass(frozen=True)
class PolicyLoss:
    """What the configuration says of the loss."""

    eps_clip: float = 0.2
    eps_clip_higher: float | None = None
    c_clip: float | None = None
    use_decoupled_loss: bool = True
    behave_imp_weight_cap: float | None = None
    behave_imp_weight_mode: str = "token_mask"
    importance_sampling_level: str = "token"

    def __post_init__(self) -> None:
        if self.behave_imp_weight_mode not in IMP_WEIGHT_MODES:
            raise ValueError(f"behave_imp_weight_mode {self.behave_imp_weight_mode!r} is none of {IMP_WEIGHT_MODES}")
        if self.importance_sampling_level not in ("token", "sequence"):
            raise ValueError(f"importance_sampling_level {self.importance_sampling_level!r} is not token or sequence")

    @classmethod
    def from_config(cls, actor: Any) -> PolicyLoss:
        """Of the section `actor`."""
        return cls(**{name: getattr(actor, name) for name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class LossTokens:
    """Values of the R loss tokens of a micro-batch, sample after sample."""

    behave_R: Tensor  # log μ
    advantage_R: Tensor
    sample_R: Tensor  # int64, 0 … samples−1, ascending
    samples: int
    prox_R: Tensor | None = None  # log π before the update; None where the loss does not use it, or it is π itself

    def mean_per_sample(self, value_R: Tensor) -> Tensor:
        """Mean over each sample's tokens, given back to every token of it."""
        zero_S = value_R.new_zeros(self.samples)
        count_S = zero_S.index_add(0, self.sample_R, torch.ones_like(value_R))
        return (zero_S.index_add(0, self.sample_R, value_R) / count_S.clamp(min=1))[self.sample_R]


@dataclass
class LossCounts:
    """Sums and extremes over loss tokens; added up over micro-batches and ranks."""

    SUMS = ("tokens", "clipped", "capped", "behave_diff", "loss")
    MAXIMA = ("prox_diff_max", "behave_diff_max", "ratio_max")

    tokens: float = 0.0
    clipped: float = 0.0
    capped: float = 0.0
    behave_diff: float = 0.0  # Σ |log π_prox/μ|
    loss: float = 0.0
    prox_diff_max: float = 0.0  # max |log π/π_prox|
    behave_diff_max: float = 0.0  # max |log π_prox/μ|
    ratio_max: float = 0.0

    def add(self, other: LossCounts) -> None:
        """Adds the counts of another micro-batch."""
        for name in self.SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in self.MAXIMA:
            setattr(self, name, max(getattr(self, name), getattr(other, name)))


def policy_loss(logp_R: Tensor, tokens: LossTokens, n_tokens: int, settings: PolicyLoss) -> tuple[Tensor, Tensor]:
    """Loss of a micro-batch and its counts (`counts_of` reads them: they stay on the device until then).

    `n_tokens` is the number of loss tokens of the GLOBAL minibatch, before any masking.
    """
    current_R = logp_R.detach()
    prox_R = current_R if tokens.prox_R is None else tokens.prox_R.to(logp_R)
    behave_R = tokens.behave_R.to(logp_R)
    advantage_R = tokens.advantage_R.to(logp_R)
    base_R = prox_R if settings.use_decoupled_loss else behave_R
    log_ratio_R = logp_R - base_R
    if settings.importance_sampling_level == "sequence":
        log_ratio_R = tokens.mean_per_sample(log_ratio_R)
        advantage_R = tokens.mean_per_sample(advantage_R)
    weight_R, kept_R = _behave_weight(prox_R - behave_R, tokens, settings)
    # a masked token must not bring an overflow of its own ratio into the gradient
    ratio_R = torch.where(kept_R, log_ratio_R, torch.zeros_like(log_ratio_R)).exp()
    higher = settings.eps_clip if settings.eps_clip_higher is None else settings.eps_clip_higher
    plain_R = ratio_R * advantage_R
    clipped_R = ratio_R.clamp(1 - settings.eps_clip, 1 + higher) * advantage_R
    objective_R = torch.minimum(plain_R, clipped_R)
    if settings.c_clip is not None:
        floor_R = settings.c_clip * advantage_R
        objective_R = torch.where(advantage_R < 0, torch.maximum(objective_R, floor_R), objective_R)
    per_token_R = torch.where(kept_R, weight_R * objective_R, torch.zeros_like(objective_R))
    loss = -per_token_R.sum() / n_tokens
    with torch.no_grad():
        diff_R = (prox_R - behave_R).abs()
        clip_R = (objective_R != plain_R) & kept_R
        counts = _stack(loss, clip_R, ~kept_R, (current_R - prox_R).abs(), diff_R, log_ratio_R)
    return loss, counts


def supervised_loss(logp_R: Tensor, n_tokens: int) -> Tensor:
    """Mean negative log-likelihood over the completion tokens of the global minibatch; the part of this micro-batch."""
    return -logp_R.sum() / n_tokens


def counts_of(stacked: Tensor) -> LossCounts:
    """Counts as plain numbers (the one synchronisation with the device)."""
    values = stacked.tolist()
    return LossCounts(**dict(zip(LossCounts.SUMS + LossCounts.MAXIMA, values, strict=True)))


def _behave_weight(log_weight_R: Tensor, tokens: LossTokens, settings: PolicyLoss) -> tuple[Tensor, Tensor]:
    """sg(w) and which tokens count. A sequence's weight is the geometric mean of its tokens' weights."""
    everything_R = torch.ones_like(log_weight_R, dtype=torch.bool)
    mode, cap = settings.behave_imp_weight_mode, settings.behave_imp_weight_cap
    if not settings.use_decoupled_loss or mode == "disabled":
        return torch.ones_like(log_weight_R), everything_R
    if mode.startswith("sequence"):
        log_weight_R = tokens.mean_per_sample(log_weight_R)
    weight_R = log_weight_R.exp()
    if cap is None:
        return weight_R, everything_R
    if mode.endswith("truncate"):
        return weight_R.clamp(max=cap), everything_R
    return weight_R, weight_R <= cap


def _stack(
    loss: Tensor, clip_R: Tensor, capped_R: Tensor, prox_diff_R: Tensor, diff_R: Tensor, log_ratio_R: Tensor
) -> Tensor:
    zero = loss.new_zeros(())
    some = log_ratio_R.numel() > 0
    values = [
        loss.new_tensor(float(log_ratio_R.numel())),
        clip_R.sum(),
        capped_R.sum(),
        diff_R.sum(),
        loss.detach(),
        prox_diff_R.max() if some else zero,
        diff_R.max() if some else zero,
        log_ratio_R.max().exp() if some else zero,
    ]
    return torch.stack([value.double() for value in values])
