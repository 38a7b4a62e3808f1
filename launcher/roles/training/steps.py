"""One GRPO step on one rank: from a batch's index to updated weights.

Owns what happens inside a step (packing, fetching, scoring, advantages, updates) and its numbers; when steps happen,
what is published and what is saved is the loop's (rl).
Shapes: S samples of the batch, R loss tokens of this rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from core.engine.microbatch import Item, Minibatch, Packing, pack
from core.engine.optimizer import learning_rate
from core.engine.train_engine import Update
from core.ops.packed import PackedBatch, Scores
from core.rl.advantages import (
    Normalisation,
    Shaping,
    group_index,
    kl_penalty,
    normalise_advantages,
    sample_outcomes,
    token_advantages,
)
from core.rl.losses import LossCounts, LossTokens, PolicyLoss, counts_of, policy_loss
from core.telemetry.phases import announce
from launcher.roles.training.parity import Gate, Parity
from launcher.roles.training.parts import Part, fetch_parts, score_parts
from launcher.roles.training.passage import pass_gate
from launcher.roles.training.setup import Session


@dataclass(frozen=True)
class Index:
    """What every rank knows of a batch before it fetches its part."""

    step: int
    lengths: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    groups: tuple[str, ...]
    packing: Packing

    @property
    def samples(self) -> int:
        return len(self.lengths)

    def loss_tokens(self, minibatch: Minibatch) -> int:
        """Loss tokens of the global minibatch, before any masking."""
        numbers = [i for rank in minibatch.ranks for micro in rank for i in micro]
        return sum(self.lengths[i] - self.prompt_lengths[i] for i in numbers)


def make_index(reply: dict[str, Any], session: Session) -> dict[str, Any]:
    """Packs the batch for all ranks; JSON, for `read_index` on every rank."""
    announce("packing")
    rows = reply["samples"]
    items = [
        Item(
            row["length"],
            str(row["group"]),
            tuple((name, row["patches"] // len(row["images"])) for name in row["images"]),
        )
        for row in rows
    ]
    minibatches = session.config.actor.ppo_n_minibatches
    packing = pack(items, ranks=session.mesh.dp_size, minibatches=minibatches, limits=session.limits)
    return {
        "step": reply["step"],
        "lengths": [row["length"] for row in rows],
        "prompt_lengths": [row["prompt_length"] for row in rows],
        "groups": [str(row["group"]) for row in rows],
        "packing": packing.to_json(),
    }


def read_index(value: dict[str, Any]) -> Index:
    return Index(
        value["step"],
        tuple(value["lengths"]),
        tuple(value["prompt_lengths"]),
        tuple(value["groups"]),
        Packing.from_json(value["packing"]),
    )


@dataclass
class Outcome:
    """What a step did, on every rank the same."""

    updates: list[Update]
    counts: LossCounts
    first_prox_diff_max: float
    entropy: float | None
    kl: float | None
    lr: float
    loss_tokens: int
    tokens: int
    secs: dict[str, float] = field(default_factory=dict)
    parity: Parity | None = None
    parity_warning: str | None = None

    @property
    def skipped(self) -> bool:
        return any(update.skipped for update in self.updates)

    @property
    def loss(self) -> float:
        return sum(update.loss for update in self.updates) / len(self.updates)

    @property
    def grad_norm(self) -> float:
        return max(update.grad_norm for update in self.updates)


def train_step(
    index: Index, session: Session, *, total_steps: int, on_update: Callable[[], None], gate: Gate | None = None
) -> Outcome:
    """Collective. `on_update` is called after every optimizer step: from then on a stop cannot save the step before.

    Raises ParityError before the first update where the gate is due and shut.
    """
    clock = _Clock()
    announce("fetch")
    parts = fetch_parts(index.packing, index.step, session)
    clock.lap("fetch")
    actor = session.config.actor
    with_kl = session.ref is not None
    one_update = len(index.packing.minibatches) == 1
    # with one minibatch π_prox is the π of its own forward: recompute_logprob chooses whether to measure it apart
    gated = gate is not None and gate.is_due(index.step)
    recompute = with_kl or (actor.use_decoupled_loss and not one_update) or actor.recompute_logprob or gated
    entropy = _score(parts, session) if recompute else None
    parity, warning = None, None
    if gate is not None and gated:
        parity, warning = pass_gate([part for own in parts for part in own], index.step - 1, gate, session)
    ref_R = _score_ref(parts, session)
    clock.lap("prox")
    kl = _advantages(index, parts, ref_R, session)
    lr = learning_rate(actor.optimizer, index.step, total_steps)
    settings = PolicyLoss.from_config(actor)
    updates: list[Update] = []
    counts, first_diff = LossCounts(), 0.0
    for minibatch, own in zip(index.packing.minibatches, parts, strict=True):
        update, found = _update(own, index.loss_tokens(minibatch), lr, settings, session)
        first_diff = first_diff if updates else found.prox_diff_max
        updates.append(update)
        counts.add(found)
        on_update()
    secs = {**clock.secs, "forward_backward": sum(update.forward_backward_secs for update in updates)}
    secs["optimizer"] = sum(update.optimizer_secs for update in updates)
    loss_tokens = sum(index.loss_tokens(minibatch) for minibatch in index.packing.minibatches)
    tokens = sum(index.lengths)
    return Outcome(updates, counts, first_diff, entropy, kl, lr, loss_tokens, tokens, secs, parity, warning)


class _Clock:
    def __init__(self) -> None:
        self.secs: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.secs[name] = now - self._last
        self._last = now


def _score(parts: list[list[Part]], session: Session) -> float:
    """π before the update for every token; returns the mean entropy over the batch."""
    flat = [part for own in parts for part in own]
    found = score_parts(session.engine, flat, session, with_entropies)
    entropy = torch.zeros(2, dtype=torch.float64)
    for part, scores in zip(flat, found, strict=True):
        part.prox_R = scores.logp_R
        if scores.entropy_R is not None:
            entropy += torch.tensor([scores.entropy_R.double().sum().item(), float(scores.entropy_R.numel())])
    total, count = session.exchange.sum_samples(entropy).tolist()
    return total / count if count else 0.0


def _score_ref(parts: list[list[Part]], session: Session) -> Tensor | None:
    """log ref of this rank's loss tokens, or None without a reference model."""
    if session.ref is None:
        return None
    flat = [part for own in parts for part in own]
    return torch.cat([scores.logp_R.cpu() for scores in score_parts(session.ref, flat, session)])


def with_entropies(batch: PackedBatch) -> PackedBatch:
    """The same batch, scored with the entropy of each row."""
    assert batch.scoring is not None
    return replace(batch, scoring=batch.scoring._replace(with_entropy=True))


def _advantages(index: Index, parts: list[list[Part]], ref_R: Tensor | None, session: Session) -> float | None:
    """Sets the advantages of every part's tokens; returns the mean KL to the reference, if there is one."""
    actor = session.config.actor
    flat = [part for own in parts for part in own]
    own = [(i, sample) for part in flat for i, sample in zip(part.numbers, part.samples, strict=True)]
    facts_S2 = torch.zeros(index.samples, 2, dtype=torch.float64)
    for i, sample in own:
        facts_S2[i] = torch.tensor([sample.reward, float(sample.truncated)], dtype=torch.float64)
    reward_S, truncated_S = session.exchange.sum_samples(facts_S2).unbind(1)
    response_S = torch.tensor(index.lengths) - torch.tensor(index.prompt_lengths)
    group_S = group_index(index.groups)
    outcome_S = sample_outcomes(
        reward_S,
        response_S,
        truncated_S > 0,
        group_S,
        shaping=Shaping.from_config(actor, session.config.gconfig.max_new_tokens),
        norm=Normalisation.from_config(actor.reward_norm),
        mask_truncated=actor.mask_no_eos_with_zero,
    )
    numbers = torch.tensor([i for i, _ in own], dtype=torch.int64)
    kl_R = None
    if ref_R is not None:
        prox_R = torch.cat([part.prox_R.cpu() for part in flat if part.prox_R is not None])
        kl_R = kl_penalty(prox_R, ref_R, actor.kl_estimator)
    lengths = response_S[numbers]
    advantage_R = token_advantages(
        outcome_S[numbers],
        lengths,
        kl_R=kl_R,
        kl_ctl=actor.kl_ctl,
        discount=actor.discount,
        gae_lambda=actor.gae_lambda,
    )
    sample_R = torch.repeat_interleave(numbers, lengths)
    norm = Normalisation.from_config(actor.adv_norm)
    advantage_R = normalise_advantages(advantage_R, sample_R, group_S, norm, session.exchange.sum_samples)
    sizes = [sum(document.scored for document in part.documents) for part in flat]
    for part, piece_R in zip(flat, advantage_R.split(sizes), strict=True):
        part.advantage_R = piece_R
    if kl_R is None:
        return None
    kl = session.exchange.sum_samples(torch.stack([kl_R.sum(), torch.tensor(float(len(kl_R)), dtype=torch.float64)]))
    return float(kl[0] / kl[1]) if kl[1] else 0.0


def _update(
    parts: list[Part], n_tokens: int, lr: float, settings: PolicyLoss, session: Session
) -> tuple[Update, LossCounts]:
    counted: list[Tensor] = []
    device = session.mesh.device

    def loss(j: int, scores: Scores) -> Tensor:
        part = parts[j]
        assert part.advantage_R is not None
        tokens = LossTokens(
            behave_R=part.behave_R.to(device),
            advantage_R=part.advantage_R.to(device),
            sample_R=part.sample_R.to(device),
            samples=len(part.samples),
            prox_R=part.prox_R,
        )
        value, counts = policy_loss(scores.logp_R, tokens, n_tokens, settings)
        counted.append(counts)
        return value

    update = session.engine.train([part.micro for part in parts], loss, lr, session.stop.check)
    return update, reduce_counts([counts_of(found) for found in counted], session)


def reduce_counts(counted: list[LossCounts], session: Session) -> LossCounts:
    """Counts of all micro-batches of all ranks. A value that is not a number stays one."""
    total = LossCounts()
    for counts in counted:
        total.add(counts)
    sums = torch.tensor([getattr(total, name) for name in LossCounts.SUMS], dtype=torch.float64)
    maxima = torch.tensor([getattr(total, name) for name in LossCounts.MAXIMA], dtype=torch.float64)
    sums, maxima = session.exchange.sum_samples(sums), session.exchange.max_samples(maxima)
    values = dict(zip(LossCounts.SUMS + LossCounts.MAXIMA, [*sums.tolist(), *maxima.tolist()], strict=True))
    return LossCounts(**{name: value if math.isfinite(value) else math.inf for name, value in values.items()})
