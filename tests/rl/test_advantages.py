"""Advantages against plain loops in float64, written from the design and not from the code."""

from __future__ import annotations

import contextlib
import math
import random

import pytest
import torch

from core.rl.advantages import (
    Normalisation,
    RewardError,
    Shaping,
    equal_groups,
    group_index,
    kl_penalty,
    normalise_advantages,
    normalise_rewards,
    sample_outcomes,
    shape_rewards,
    token_advantages,
)

F64 = torch.float64


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def deviation(values: list[float], unbiased: bool) -> float:
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (len(values) - (1 if unbiased else 0)))


def normalised_by_hand(rewards: list[float], groups: list[str], norm: Normalisation) -> list[float]:
    """(x − mean)/(std + eps), set by set, nothing shared between samples."""
    out = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        same = [j for j in range(len(rewards)) if groups[j] == group]
        sets = {"group": same, "batch": list(range(len(rewards)))}
        centred = reward
        if norm.mean_level is not None:
            members = [j for j in sets[norm.mean_level] if not (norm.mean_leave1out and j == i)]
            centred = reward - mean([rewards[j] for j in members])
            if norm.mean_level == "group" and len({rewards[j] for j in same}) == 1:
                centred = 0.0
        if norm.std_level is not None:
            centred /= deviation([rewards[j] for j in sets[norm.std_level]], norm.std_unbiased) + norm.eps
        out.append(centred)
    return out


LEVELS = [(m, s) for m in ("batch", "group", None) for s in ("batch", "group", None)]


@pytest.mark.parametrize(("mean_level", "std_level"), LEVELS)
@pytest.mark.parametrize("leave1out", [False, True])
@pytest.mark.parametrize("unbiased", [False, True])
def test_reward_norm_is_what_a_plain_loop_gives(mean_level, std_level, leave1out, unbiased):
    # groups of unequal sizes whose samples are scattered over the batch
    random.seed(3)
    groups = ["a"] * 4 + ["b"] * 2 + ["c"] * 5 + ["d"] * 3
    random.shuffle(groups)
    rewards = [round(random.uniform(-2, 3), 3) for _ in groups]
    rewards = [0.7 if group == "d" else reward for group, reward in zip(groups, rewards, strict=True)]
    norm = Normalisation(mean_level, std_level, leave1out, unbiased, eps=1e-5)
    found = normalise_rewards(torch.tensor(rewards, dtype=F64), group_index(groups), norm)
    wanted = normalised_by_hand(rewards, groups, norm)
    assert found.dtype == F64
    assert found.tolist() == pytest.approx(wanted, rel=1e-12, abs=1e-12)


def test_equal_rewards_of_a_group_come_out_as_exactly_zero():
    # 0.1 * 3 / 3 is not 0.1 in binary: the mean alone would leave 1e-17, and a tiny std would blow it up
    rewards = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0], dtype=F64)
    group_S = group_index(["x", "x", "x", "y", "y"])
    for std_level in ("batch", "group", None):
        for leave1out in (False, True):
            found = normalise_rewards(rewards, group_S, Normalisation("group", std_level, leave1out, eps=0.0))
            assert found[:3].tolist() == [0.0, 0.0, 0.0]
            assert found[3] > 0 > found[4]
    assert equal_groups(rewards, group_S).tolist() == [True, False]


def test_the_deviation_of_one_value_is_refused_with_what_to_do():
    with pytest.raises(RewardError, match="n_samples"):
        normalise_rewards(torch.tensor([1.0, 2.0]), group_index(["a", "b"]), Normalisation("batch", "group"))
    with pytest.raises(RewardError, match="leave1out"):
        normalise_rewards(torch.tensor([1.0, 2.0]), group_index(["a", "b"]), Normalisation("group", None, True))


def test_overlong_then_bias_then_scaling_then_clip():
    shaping = Shaping(
        bias=-0.5, scaling=10.0, clip=4.0, overlong_tokens=4, overlong_penalty_factor=2.0, max_new_tokens=10
    )
    found = shape_rewards(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([6, 8, 10, 10]), shaping)
    # at 6 of 10 tokens none, at 8 half of 2.0, at 10 all of it; (r − 0.5)·10 is then cut to ±4
    assert found.tolist() == [4.0, -4.0, -4.0, -4.0]
    plain = Shaping(
        bias=-0.5, scaling=10.0, clip=20.0, overlong_tokens=4, overlong_penalty_factor=2.0, max_new_tokens=10
    )
    found = shape_rewards(torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([6, 8, 10, 10]), plain)
    assert found.tolist() == [5.0, -5.0, -15.0, -20.0]


def test_a_cut_answer_earns_nothing_where_asked_for():
    rewards, group_S = torch.tensor([1.0, 0.0, 0.5]), group_index(["g"] * 3)
    norm, cut_S = Normalisation("group", None), torch.tensor([True, False, False])
    arguments = {"shaping": Shaping(), "norm": norm}
    kept = sample_outcomes(rewards, torch.tensor([3, 3, 3]), cut_S, group_S, **arguments, mask_truncated=False)
    zeroed = sample_outcomes(rewards, torch.tensor([3, 3, 3]), cut_S, group_S, **arguments, mask_truncated=True)
    assert kept.tolist() == [0.5, -0.5, 0.0]
    assert zeroed.tolist() == [0.0, -0.5, 0.0]


@pytest.mark.parametrize(
    ("estimator", "wanted"),
    [
        ("k1", lambda p, q: math.log(p / q)),
        ("k2", lambda p, q: 0.5 * math.log(p / q) ** 2),
        ("k3", lambda p, q: q / p - 1 - math.log(q / p)),
    ],
)
def test_kl_estimators(estimator, wanted):
    pairs = [(0.5, 0.25), (0.2, 0.6), (0.9, 0.9)]
    logp = torch.tensor([math.log(p) for p, _ in pairs], dtype=F64)
    ref = torch.tensor([math.log(q) for _, q in pairs], dtype=F64)
    assert kl_penalty(logp, ref, estimator).tolist() == pytest.approx([wanted(p, q) for p, q in pairs], abs=1e-15)


@pytest.mark.parametrize("decay", [(1.0, 1.0), (0.9, 0.8)])
@pytest.mark.parametrize("kl_ctl", [0.0, 0.3])
def test_token_advantages_are_discounted_sums(decay, kl_ctl):
    discount, lam = decay
    outcomes, lengths = [2.0, -1.0, 0.5], [3, 1, 4]
    kl = [0.1, 0.2, -0.3, 0.4, 0.0, 0.25, 0.5, -0.1]
    found = token_advantages(
        torch.tensor(outcomes),
        torch.tensor(lengths),
        kl_R=torch.tensor(kl, dtype=F64),
        kl_ctl=kl_ctl,
        discount=discount,
        gae_lambda=lam,
    )
    wanted, start = [], 0
    for outcome, length in zip(outcomes, lengths, strict=True):
        rewards = [-kl_ctl * kl[start + t] + (outcome if t == length - 1 else 0.0) for t in range(length)]
        wanted += [sum((discount * lam) ** (k - t) * rewards[k] for k in range(t, length)) for t in range(length)]
        start += length
    assert found.tolist() == pytest.approx(wanted, abs=1e-14)


@pytest.mark.parametrize(("mean_level", "std_level"), LEVELS)
def test_adv_norm_does_not_depend_on_which_rank_holds_which_sample(mean_level, std_level):
    random.seed(5)
    lengths, groups = [3, 1, 4, 2, 5, 2], ["a", "b", "a", "c", "b", "c"]
    advantages = [[random.uniform(-3, 3) for _ in range(n)] for n in lengths]
    norm = Normalisation(mean_level, std_level, eps=1e-5)
    flat = [value for sample in advantages for value in sample]
    owner = [i for i, sample in enumerate(advantages) for _ in sample]
    wanted = []
    for i, sample in enumerate(advantages):
        tokens = {"batch": flat, "group": [v for j, s in enumerate(advantages) if groups[j] == groups[i] for v in s]}
        centre = mean(tokens[mean_level]) if mean_level else 0.0
        scale = deviation(tokens[std_level], True) + 1e-5 if std_level else 1.0
        wanted += [(value - centre) / scale for value in sample]
    held = [[0, 3], [1, 2, 4, 5]]  # samples of two ranks
    flat_R, owner_R, group_S = torch.tensor(flat, dtype=F64), torch.tensor(owner), group_index(groups)
    contributions = []

    def record(values: torch.Tensor) -> torch.Tensor:
        contributions.append(values.clone())
        return values

    masks = [torch.isin(owner_R, torch.tensor(rank)) for rank in held]
    for mask in masks:
        # a rank alone may have too few values: only what it contributes counts here
        with contextlib.suppress(RewardError):
            normalise_advantages(flat_R[mask], owner_R[mask], group_S, norm, record)
    summed = contributions[0] + contributions[1]
    for mask in masks:
        found = normalise_advantages(flat_R[mask], owner_R[mask], group_S, norm, lambda _: summed.clone())
        assert found.tolist() == pytest.approx(
            [w for w, own in zip(wanted, mask.tolist(), strict=True) if own], rel=1e-11
        )
