"""Draws follow the reported distribution, are keyed by seed and position alone, and masks are exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from core.inference.embedded.request import BadRequestError, ModelTraits, Prompt, Request, Sampling
from core.inference.embedded.sampling import Sampler, uniform

VOCAB = 11
TRAITS = ModelTraits(VOCAB, 64, (3, 4), None, None, has_vision=False)


def request(seed: int = 0, outputs: int = 0, **params: object) -> Request:
    made = Request("r", Prompt.expand([1, 2], (), TRAITS), Sampling.parse({"sampling_seed": seed, **params}, TRAITS))
    made.output_ids = [0] * outputs
    return made


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def test_draws_follow_the_distribution() -> None:
    logits = np.random.default_rng(0).normal(size=VOCAB) * 1.5
    count = 20_000
    rows = torch.from_numpy(logits).repeat(count, 1)
    tokens, reported = Sampler(VOCAB).draw(rows, [request(seed, temperature=0.8) for seed in range(count)])
    p = softmax(logits / 0.8)
    observed = np.bincount(tokens, minlength=VOCAB)
    chi2 = ((observed - count * p) ** 2 / (count * p)).sum()
    assert chi2 < 29.6, "99.9% quantile of chi2 with 10 degrees of freedom"  # scipy.stats.chi2.ppf(0.999, 10)
    np.testing.assert_allclose(reported, np.log(p)[tokens], atol=1e-12)


def test_the_draw_depends_on_seed_and_position_only() -> None:
    numbers = {(seed, position): uniform(seed, position) for seed in range(30) for position in range(30)}
    assert len(set(numbers.values())) == 900
    assert all(0 <= number < 1 for number in numbers.values())
    assert abs(np.mean(list(numbers.values())) - 0.5) < 0.05
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    requests = [request(seed, outputs=seed % 3) for seed in range(5)]
    together, _ = Sampler(VOCAB).draw(logits, requests)
    alone = [Sampler(VOCAB).draw(logits[i : i + 1], [requests[i]])[0][0] for i in range(5)]
    turned, _ = Sampler(VOCAB).draw(logits.flip(0), requests[::-1])
    assert together == alone == turned[::-1]


def test_a_continuation_draws_what_the_whole_would_have_drawn() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    whole = request(5, outputs=3)
    resent = Request("r", Prompt.expand([1, 2, 0, 0, 0], (), TRAITS), whole.sampling)
    assert Sampler(VOCAB).draw(logits, [whole]) == Sampler(VOCAB).draw(logits, [resent])


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (-1, 0.7), (6, 0.5), (1, 1.0), (-1, 1e-9)])
def test_truncation_reports_the_truncated_distribution(top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(2).normal(size=VOCAB)
    order = np.argsort(-logits)
    kept = order[:top_k] if top_k > 0 else order
    p = softmax(logits[kept])
    kept = kept[np.cumsum(p) - p <= top_p]
    expected = np.full(VOCAB, -np.inf)
    expected[kept] = np.log(softmax(logits[kept]))
    requests = [request(seed, top_k=top_k, top_p=top_p) for seed in range(400)]
    tokens, reported = Sampler(VOCAB).draw(torch.from_numpy(logits).repeat(400, 1), requests)
    assert set(tokens) == set(kept.tolist())
    np.testing.assert_allclose(reported, expected[tokens], atol=1e-12)


def test_bans_bias_and_early_ends_are_masked_before_the_temperature() -> None:
    logits = np.random.default_rng(3).normal(size=VOCAB)
    params = {"logit_bias": {"5": -100, "6": -1e9, "7": 1.5}, "min_new_tokens": 2, "stop_token_ids": [8]}
    for outputs, ends in ((0, [3, 4, 8]), (1, [3, 4, 8]), (2, [])):
        biased = logits.copy()
        biased[7] += 1.5
        biased[[5, 6, *ends]] = -np.inf
        with np.errstate(divide="ignore"):
            expected = np.log(softmax(biased / 0.5))
        requests = [request(seed, outputs, temperature=0.5, **params) for seed in range(600)]
        tokens, reported = Sampler(VOCAB).draw(torch.from_numpy(logits).repeat(600, 1), requests)
        assert not set(tokens) & {5, 6, *ends}
        np.testing.assert_allclose(reported, expected[tokens], atol=1e-12)


def test_rows_of_one_step_keep_their_own_rules() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4)).double()
    best = int(logits[0].argmax())
    requests = [
        request(0, temperature=0.0),
        request(1, temperature=0.3, logit_bias={str(best): -200}),
        request(2, temperature=2.0, min_new_tokens=1),
    ]
    together = Sampler(VOCAB).draw(logits, requests)
    alone = [Sampler(VOCAB).draw(logits[i : i + 1], [requests[i]]) for i in range(3)]
    assert together == ([a[0][0] for a in alone], [a[1][0] for a in alone])
    assert together[0][0] == best


def test_a_number_at_the_edge_never_draws_an_impossible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, [2, 6]] = torch.tensor([0.0, 0.0])
    for number, token in ((0.0, 2), (0.5 - 1e-16, 2), (0.5, 6), (1 - 2.0**-53, 6)):
        monkeypatch.setattr("core.inference.embedded.sampling.uniform", lambda *_, n=number: n)
        assert Sampler(VOCAB).draw(logits, [request()])[0] == [token], number


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": 2.5}, "max_new_tokens"),
        ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens=9"),
        ({"stop_token_ids": [99]}, "stop_token_ids: 99"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"2": "no"}}, "logit_bias"),
        ({"logit_bias": {str(i): -100 for i in range(VOCAB)}}, "bans every token"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"stop": ["x"]}, "stop"),
        ({"tempertaure": 1.0}, "tempertaure"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(params: dict, words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        Sampling.parse(params, TRAITS)


def test_neutral_values_of_other_parameters_pass() -> None:
    neutral = {"min_p": 0.0, "repetition_penalty": 1.0, "n": 1, "stop": None, "skip_special_tokens": True}
    assert Sampling.parse({"sampling_seed": 1, **neutral}, TRAITS) == Sampling.parse({"sampling_seed": 1}, TRAITS)


def test_without_a_seed_draws_differ(checkpoints: dict[str, Path]) -> None:
    seeds = {Sampling.parse({}, TRAITS).seed for _ in range(8)}
    assert len(seeds) == 8
