"""One process: loss and gradients against plain autograd, sample by sample, and whatever packing may not change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from core.engine.documents import DocumentError, pack_documents
from core.engine.microbatch import Limits
from core.engine.train_engine import Micro
from tests.engine.scene import ADAM, SGD, Batch, alone, make_batch, make_checkpoint, make_engine, policy_step, whole

LIMITS = [
    Limits(),
    Limits(120, 480),
    Limits(60, 240),
    Limits(60, 240, algorithm="kk"),
    Limits(1, 4),
    Limits(n_mbs=3, n_mbs_divisor=2),
]


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a−b| / max|b|; a tensor all zero in both counts as equal."""
    scale = b.abs().max().item()
    return (a - b).abs().max().item() / scale if scale else a.abs().max().item()


def reference(checkpoint, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    """On-policy loss −(1/N) Σ w·A·ρ and its gradient: each sample alone, whole logits, plain log_softmax."""
    engine = make_engine(checkpoint, alone())
    total = torch.zeros((), dtype=torch.float64)
    for document, behave, advantage in zip(batch.documents, batch.behave, batch.advantage, strict=True):
        packed = pack_documents([document], batch.pixels, batch.rules, tower=False)
        rows = torch.arange(document.prompt_length - 1, len(document.ids) - 1)
        logits = engine.model(replace(packed, scoring=None, logit_rows_R=rows)).logits_RV / batch.rules.temperature
        mask = torch.zeros_like(logits, dtype=torch.bool)
        mask[:, list(batch.rules.banned)] = True
        mask[:2, list(batch.rules.ends)] = True  # min_new_tokens is 2
        logp = F.log_softmax(logits.masked_fill(mask, -torch.inf), -1)
        target = torch.from_numpy(document.ids[document.prompt_length :])
        logp_R = logp.gather(1, target[:, None]).squeeze(1)
        weight = (logp_R.detach() - behave).exp()
        ratio = (logp_R - logp_R.detach()).exp()
        total = total - (weight * ratio * advantage).sum() / batch.loss_tokens
    total.backward()
    return total.item(), {name: p.grad.clone() for name, p in engine.parameters.items()}


@pytest.fixture(scope="module")
def expected(checkpoint, batch):
    return reference(checkpoint, batch)


@pytest.mark.parametrize("limits", LIMITS, ids=str)
def test_loss_and_gradients_are_those_of_each_sample_alone(checkpoint, batch, expected, limits):
    engine = make_engine(checkpoint, alone())
    before = whole(engine)
    step = policy_step(engine, batch, limits)
    loss, gradients = expected
    assert step.update.loss == pytest.approx(loss, rel=1e-10)
    norm = sum(g.square().sum().item() for g in gradients.values()) ** 0.5
    assert step.update.grad_norm == pytest.approx(norm, rel=1e-9)
    # SGD with rate 1: what moved is the gradient
    for name, after in whole(engine).items():
        assert far(before[name] - after, gradients[name]) < 1e-9, name
        assert gradients[name].abs().max() > 0, name


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_first_minibatch_is_on_policy_in_fp32_for_any_micro_batch_size(checkpoint, batch, limits, checkpointing):
    engine = make_engine(checkpoint, alone(), dtype="float32", checkpointing=checkpointing)
    step = policy_step(engine, batch, limits)
    assert step.counts.tokens == batch.loss_tokens
    assert step.counts.prox_diff_max <= 1e-5
    assert abs(step.counts.ratio_max - 1) <= 1e-5


@pytest.mark.parametrize("checkpointing", ["full", "selective"])
def test_recomputing_activations_changes_no_gradient(checkpoint, batch, expected, checkpointing):
    engine = make_engine(checkpoint, alone(), checkpointing=checkpointing)
    before = whole(engine)
    policy_step(engine, batch, Limits(120, 480))
    for name, after in whole(engine).items():
        assert far(before[name] - after, expected[1][name]) < 1e-9, name


def test_without_a_scoring_pass_the_step_is_the_same(checkpoint, batch, expected):
    engine = make_engine(checkpoint, alone())
    before = whole(engine)
    policy_step(engine, batch, Limits(120, 480), recompute=False)
    for name, after in whole(engine).items():
        assert far(before[name] - after, expected[1][name]) < 1e-9, name


def test_a_frozen_tower_stays_and_the_rest_gets_the_same_gradient(checkpoint, batch, expected):
    engine = make_engine(checkpoint, alone(), freeze_vision=True)
    before = whole(engine)
    policy_step(engine, batch)
    for name, after in whole(engine).items():
        if name.startswith("visual."):
            assert torch.equal(before[name], after), name
        else:
            assert far(before[name] - after, expected[1][name]) < 1e-9, name


def test_a_frozen_tower_embeds_each_image_once(checkpoint, batch):
    engine = make_engine(checkpoint, alone(), freeze_vision=True)
    seen: list[int] = []
    engine.model.visual.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[0]))
    first = policy_step(engine, batch, Limits(120, 480), lr=0.0)
    again = policy_step(engine, batch, Limits(200, 800), lr=0.0)
    images = {name: t * h * w for document in batch.documents for name, (t, h, w) in document.images}
    assert sum(seen) == sum(images.values())
    assert again.update.loss == pytest.approx(first.update.loss, rel=1e-12)


def test_gradients_are_clipped_by_their_global_norm(checkpoint, batch, expected):
    clipped = type(SGD)(**{**vars(SGD), "gradient_clipping": 0.01})
    engine = make_engine(checkpoint, alone(), optimizer=clipped)
    before = whole(engine)
    policy_step(engine, batch)
    moved = sum((before[name] - after).square().sum().item() for name, after in whole(engine).items()) ** 0.5
    assert moved == pytest.approx(0.01, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_moves_nothing(checkpoint, batch, bad):
    engine = make_engine(checkpoint, alone(), optimizer=ADAM)
    before = whole(engine)
    broken = replace(batch, advantage=[a * bad if i == 3 else a for i, a in enumerate(batch.advantage)])
    step = policy_step(engine, broken, Limits(120, 480))
    assert step.update.skipped
    assert all(torch.equal(before[name], after) for name, after in whole(engine).items())
    assert set(engine.optimizer.updates.values()) == {0}
    assert not policy_step(engine, batch, Limits(120, 480)).update.skipped


def test_a_step_that_is_stopped_between_micro_batches_leaves_no_trace(checkpoint, batch):
    class Stop(Exception):
        pass

    engine = make_engine(checkpoint, alone(), optimizer=ADAM)
    before, calls = whole(engine), []

    def between() -> None:
        calls.append(None)
        if len(calls) == 2:
            raise Stop

    packed = pack_documents(batch.documents[:2], batch.pixels, batch.rules, tower=True)
    micros = [Micro(lambda: packed)] * 3
    with pytest.raises(Stop):
        engine.train(micros, lambda j, scores: scores.logp_R.sum(), 1.0, between)
    assert all(torch.equal(before[name], after) for name, after in whole(engine).items())
    clean, stopped = make_engine(checkpoint, alone(), optimizer=ADAM), engine
    for each in (clean, stopped):
        policy_step(each, batch, lr=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(whole(clean).values(), whole(stopped).values(), strict=True))


def test_an_untied_model_and_a_batch_without_images(tmp_path):
    path = make_checkpoint(tmp_path / "untied", tied=False)
    batch = make_batch(path, images="none")
    loss, gradients = reference_without_tower(path, batch)
    engine = make_engine(path, alone())
    before = whole(engine)
    assert policy_step(engine, batch, Limits(60, 240)).update.loss == pytest.approx(loss, rel=1e-10)
    after = whole(engine)
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= after.keys()
    for name, gradient in gradients.items():
        moved = before[name] - after[name]
        assert moved.abs().max() == 0 if gradient is None else far(moved, gradient) < 1e-9, name


def reference_without_tower(path, batch):
    """As reference, where the tower has no gradient."""
    engine = make_engine(path, alone())
    for p in engine.parameters.values():
        p.grad = None
    total = torch.zeros((), dtype=torch.float64)
    for document, behave, advantage in zip(batch.documents, batch.behave, batch.advantage, strict=True):
        packed = pack_documents([document], {}, batch.rules, tower=False)
        logp_R = engine.model(packed).scores.logp_R
        total = total - ((logp_R.detach() - behave).exp() * advantage * (logp_R - logp_R.detach()).exp()).sum()
    (total / batch.loss_tokens).backward()
    return total.item() / batch.loss_tokens, {name: p.grad for name, p in engine.parameters.items()}


def test_the_likeliest_token_is_the_argmax_of_the_logits(checkpoint, batch):
    engine = make_engine(checkpoint, alone(), dtype="float32")
    packed = pack_documents(batch.documents, batch.pixels, batch.rules, tower=True)
    (found,) = engine.most_likely([Micro(lambda: packed)])
    with torch.no_grad():
        logits = engine.model(replace(packed, scoring=None)).logits_RV
    assert torch.equal(found, logits[packed.scoring.row_R].argmax(1))


def test_samples_of_a_group_share_their_image_and_get_the_gradient_of_a_pass_each(checkpoint, batch):
    packed = pack_documents(batch.documents[:4], batch.pixels, batch.rules, tower=True)
    assert packed.pixel_values_PK.shape[0] == 4 * 6  # one 56×84 picture, four samples
    assert packed.visual_row_M.tolist() == list(range(6)) * 4


def test_an_empty_micro_batch_runs_the_tower_on_finite_values(checkpoint, batch):
    engine = make_engine(checkpoint, alone(), dtype="float32")
    packed = pack_documents([], {}, batch.rules, tower=True)
    scores = engine.model(packed).scores
    (0.0 * scores.logp_R.sum()).backward()
    gradients = [p.grad for p in engine.parameters.values()]
    assert all(g is not None and torch.equal(g, torch.zeros_like(g)) for g in gradients)


def test_a_document_that_contradicts_itself_is_named(batch):
    document = batch.documents[0]
    with pytest.raises(DocumentError, match="0-0"):
        pack_documents([replace(document, images=())], {}, batch.rules, tower=False)
    with pytest.raises(DocumentError, match=r"0-0: .* 0 to score"):
        pack_documents([replace(document, prompt_length=len(document.ids))], batch.pixels, batch.rules, tower=False)
    wrong = {**batch.pixels, "0/0": np.zeros((28, 28, 3), dtype=np.uint8)}
    with pytest.raises(DocumentError, match="image 0/0"):
        pack_documents([document], wrong, batch.rules, tower=False)
