"""The policy loss and its gradient against a scalar loop in float64: each sign of A, each clip, each mask."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from core.rl.losses import LossTokens, PolicyLoss, counts_of, policy_loss, supervised_loss

F64 = torch.float64


def by_hand(logp, prox, behave, advantage, sample, n_tokens, s: PolicyLoss):
    """Loss and its derivative for every log π, straight from the formula of the design."""
    rows = range(len(logp))
    per_sample = {k: [t for t in rows if sample[t] == k] for k in set(sample)}

    def average(values, t):
        members = per_sample[sample[t]]
        return math.fsum(values[m] for m in members) / len(members)

    base = prox if s.use_decoupled_loss else behave
    high = 1 + (s.eps_clip if s.eps_clip_higher is None else s.eps_clip_higher)
    loss, slope = 0.0, [0.0] * len(logp)
    for t in rows:
        sequence = s.importance_sampling_level == "sequence"
        log_ratio = average([a - b for a, b in zip(logp, base, strict=True)], t) if sequence else logp[t] - base[t]
        a = average(advantage, t) if sequence else advantage[t]
        ratio = math.exp(log_ratio)
        clipped = min(max(ratio, 1 - s.eps_clip), high)
        candidates = [(ratio * a, ratio * a), (clipped * a, ratio * a if clipped == ratio else 0.0)]
        value, derivative = min(candidates, key=lambda pair: pair[0])
        if s.c_clip is not None and a < 0 and s.c_clip * a > value:
            value, derivative = s.c_clip * a, 0.0
        weight = 1.0
        if s.use_decoupled_loss and s.behave_imp_weight_mode != "disabled":
            difference = [p - b for p, b in zip(prox, behave, strict=True)]
            whole = s.behave_imp_weight_mode.startswith("sequence")
            weight = math.exp(average(difference, t) if whole else difference[t])
            cap = s.behave_imp_weight_cap
            if cap is not None and weight > cap:
                weight = cap if s.behave_imp_weight_mode.endswith("truncate") else 0.0
        loss -= weight * value / n_tokens
        members = per_sample[sample[t]] if sequence else [t]
        for m in members:
            slope[m] -= weight * derivative / n_tokens / (len(members) if sequence else 1)
    return loss, slope


# log π − log π_prox chosen below, inside and above the clip; π_prox − μ below and above the cap of 2
RATIOS = [-0.5, -0.05, 0.05, 0.5]
WEIGHTS = [-0.3, 0.2, 1.1]
ADVANTAGES = [-1.5, 0.7]
GRID = list(itertools.product(RATIOS, WEIGHTS, ADVANTAGES))
SAMPLE = [t // 5 for t in range(len(GRID))]

SETTINGS = [
    PolicyLoss(**{"behave_imp_weight_cap": 2.0, **changed})
    for changed in (
        {},
        {"behave_imp_weight_cap": None},
        {"eps_clip": 0.1, "eps_clip_higher": 0.3},
        {"c_clip": 1.2},
        {"c_clip": 1.2, "eps_clip_higher": 0.4},
        {"behave_imp_weight_mode": "token_truncate"},
        {"behave_imp_weight_mode": "sequence_mask", "behave_imp_weight_cap": 1.4},
        {"behave_imp_weight_mode": "sequence_truncate", "behave_imp_weight_cap": 1.4},
        {"behave_imp_weight_mode": "disabled"},
        {"use_decoupled_loss": False},
        {"use_decoupled_loss": False, "c_clip": 1.5},
        {"importance_sampling_level": "sequence"},
        {"importance_sampling_level": "sequence", "behave_imp_weight_mode": "sequence_mask"},
    )
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_loss_and_gradient_are_the_formula(settings):
    prox = [-1.0 - 0.01 * t for t in range(len(GRID))]
    logp = [p + ratio for p, (ratio, _, _) in zip(prox, GRID, strict=True)]
    behave = [p - weight for p, (_, weight, _) in zip(prox, GRID, strict=True)]
    advantage = [a for _, _, a in GRID]
    wanted, slope = by_hand(logp, prox, behave, advantage, SAMPLE, 50, settings)
    logp_R = torch.tensor(logp, dtype=F64, requires_grad=True)
    tokens = LossTokens(
        behave_R=torch.tensor(behave, dtype=F64),
        advantage_R=torch.tensor(advantage, dtype=F64),
        sample_R=torch.tensor(SAMPLE),
        samples=max(SAMPLE) + 1,
        prox_R=torch.tensor(prox, dtype=F64),
    )
    loss, counts = policy_loss(logp_R, tokens, 50, settings)
    loss.backward()
    assert loss.item() == pytest.approx(wanted, rel=1e-12)
    assert logp_R.grad.tolist() == pytest.approx(slope, rel=1e-12, abs=1e-15)
    assert counts_of(counts).loss == pytest.approx(wanted, rel=1e-12)


def one_token(ratio, advantage, settings, weight=0.0):
    logp_R = torch.tensor([-1.0 + ratio], dtype=F64, requires_grad=True)
    one = torch.tensor([-1.0], dtype=F64)
    tokens = LossTokens(one - weight, torch.tensor([advantage], dtype=F64), torch.tensor([0]), 1, one)
    loss, counts = policy_loss(logp_R, tokens, 1, settings)
    loss.backward()
    return loss.item(), logp_R.grad.item(), counts_of(counts)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        # numbers worked out by hand with eps 0.2, higher 0.3, c 3: −min(ρA, clip(ρ)A), floored at c·A for A < 0
        (math.log(1.1), 2.0, -2.2, -2.2),
        (math.log(1.5), 2.0, -2.6, 0.0),
        (math.log(0.5), 2.0, -1.0, -1.0),
        (math.log(0.5), -2.0, 1.6, 0.0),
        (math.log(1.5), -2.0, 3.0, 3.0),
        (math.log(4.0), -2.0, 6.0, 0.0),
    ],
)
def test_golden_numbers_of_each_clip(ratio, advantage, loss, slope):
    found = one_token(ratio, advantage, PolicyLoss(eps_clip=0.2, eps_clip_higher=0.3, c_clip=3.0))
    assert found[:2] == pytest.approx((loss, slope), abs=1e-12)
    assert found[2].clipped == (1.0 if slope == 0.0 else 0.0)


def test_a_capped_token_is_counted_in_n_and_brings_nothing():
    settings = PolicyLoss(behave_imp_weight_cap=5.0)
    loss, slope, counts = one_token(0.1, 1.0, settings, weight=math.log(6.0))
    assert (loss, slope, counts.capped, counts.tokens) == (0.0, 0.0, 1.0, 1.0)
    assert counts.behave_diff_max == pytest.approx(math.log(6.0))


def test_a_masked_token_of_infinite_ratio_leaves_the_gradient_finite():
    settings = PolicyLoss(behave_imp_weight_cap=5.0)
    loss, slope, _ = one_token(1000.0, -1.0, settings, weight=800.0)
    assert (loss, slope) == (0.0, 0.0)


def test_without_prox_the_loss_is_that_of_a_prox_equal_to_pi():
    settings = PolicyLoss(behave_imp_weight_cap=2.0, c_clip=2.0)
    values = torch.linspace(-3, -0.1, 12, dtype=F64)
    losses = []
    for prox in (values, None):
        logp_R = values.clone().requires_grad_()
        tokens = LossTokens(values - 0.3, torch.linspace(-1, 1, 12), torch.arange(12) // 4, 3, prox)
        loss, counts = policy_loss(logp_R, tokens, 12, settings)
        loss.backward()
        losses.append((loss.item(), logp_R.grad.tolist(), counts.tolist()))
    assert losses[0] == losses[1]


def test_parts_of_a_minibatch_add_up_to_the_whole():
    """The scale is the global number of tokens: cutting at sample borders changes nothing."""
    settings = PolicyLoss(behave_imp_weight_cap=1.4, behave_imp_weight_mode="sequence_mask")
    generator = torch.Generator().manual_seed(0)
    logp, prox, behave, advantage = torch.randn(4, 12, generator=generator, dtype=F64) * 0.3
    sample = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3])
    whole, _ = policy_loss(logp, LossTokens(behave, advantage, sample, 4, prox), 12, settings)
    parts = []
    for rows in (slice(0, 5), slice(5, 12)):
        some = sample[rows] - sample[rows][0]
        tokens = LossTokens(behave[rows], advantage[rows], some, int(some.max()) + 1, prox[rows])
        parts.append(policy_loss(logp[rows], tokens, 12, settings)[0])
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-13)


def test_supervised_loss_is_the_mean_over_global_tokens():
    assert supervised_loss(torch.tensor([-1.0, -3.0]), 8).item() == 0.5
