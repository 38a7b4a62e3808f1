"""The forward protocol: rows, scores, shared and dummy images, a cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from core.ops.packed import CausalVLM, PackedBatch, Scoring
from core.ops.rope import PlaceholderError
from models.archon.qwen2.model import Qwen2Model, Qwen2ModelArgs
from models.archon.qwen2.model.model import StreamError
from models.archon.qwen2.model.vision import GridError
from tests.model.checkpoints import IMAGE, VIDEO, Shape, distance, document, pack, pixels, saved, text_model, vlm


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(vlm(Shape(), dtype=torch.float64), tmp_path_factory.mktemp("vlm"))


@pytest.fixture
def model(checkpoint: Path) -> Qwen2Model:
    return Qwen2Model(Qwen2ModelArgs.from_pretrained(checkpoint, dtype="float64"))


def all_logits(model: Qwen2Model, packed: PackedBatch) -> Tensor:
    logits = model(packed).logits_RV
    assert logits is not None
    return logits


def test_the_model_speaks_the_engines_protocol(model: Qwen2Model) -> None:
    assert isinstance(model, CausalVLM)
    units = model.fsdp_units()
    flat = [module for unit in units for module in unit]
    inside = {id(p) for module in flat for p in module.parameters()}
    assert inside == {id(p) for p in model.parameters()}
    assert units[-1] == [model.model.embed_tokens, model.model.norm, model.lm_head]


def test_logits_at_rows(model: Qwen2Model, rng: np.random.Generator) -> None:
    documents = [document(rng, 4, (1, 4, 6), 5), document(rng, 6)]
    packed = pack(documents, pixels(rng, documents[0].grids, torch.float64))
    rows = torch.tensor([12, 3, 0])
    some = all_logits(model, replace(packed, logit_rows_R=rows))
    assert distance(some, all_logits(model, packed)[rows]) <= 1e-12


def test_scores_are_those_of_the_logits(model: Qwen2Model, rng: np.random.Generator) -> None:
    documents = [document(rng, 4, (1, 4, 6), 5), document(rng, 6)]
    packed = pack(documents, pixels(rng, documents[0].grids, torch.float64))
    rows = torch.tensor([11, 12, 16, 17])
    early = torch.tensor([True, False, True, False])
    scoring = Scoring(rows, packed.input_ids_T[rows + 1], 0.7, (IMAGE, VIDEO), (2,), early, True)
    scores = model(replace(packed, scoring=scoring)).scores
    assert scores is not None and scores.entropy_R is not None
    logits = all_logits(model, packed)[rows] / 0.7
    logits[:, [IMAGE, VIDEO]] = -torch.inf
    logits[early, 2] = -torch.inf
    logp = logits.log_softmax(-1)
    assert distance(scores.logp_R, logp.gather(1, scoring.target_R[:, None])[:, 0]) <= 1e-12
    entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)
    assert distance(scores.entropy_R, entropy) <= 1e-12


def test_samples_share_one_pass_of_their_image(model: Qwen2Model, rng: np.random.Generator) -> None:
    grids = [(1, 4, 6), (1, 6, 4)]
    documents = [document(rng, 3, grids[0], 4), document(rng, 2, grids[0], 6), document(rng, 3, grids[1], 4)]
    first, second = pixels(rng, [grids[0]], torch.float64), pixels(rng, [grids[1]], torch.float64)
    weight = torch.from_numpy(rng.standard_normal((sum(len(d.ids) for d in documents), 96)))
    apart = pack(documents, torch.cat([first, first, second]))
    (all_logits(model, apart) * weight).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    logits = all_logits(model, apart).detach()

    model.zero_grad()
    rows = torch.cat([torch.arange(6), torch.arange(6), torch.arange(6, 12)])
    shared = replace(
        apart, pixel_values_PK=torch.cat([first, second]), grid_thw=(grids[0], grids[1]), visual_row_M=rows
    )
    found = all_logits(model, shared)
    assert distance(found, logits) <= 1e-12
    (found * weight).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and distance(parameter.grad, expected[name]) <= 1e-10, name


@pytest.mark.parametrize("rows", [None, torch.empty(0, dtype=torch.int64)], ids=["in-order", "none-named"])
def test_a_dummy_image_gives_zero_gradients_to_the_tower(
    model: Qwen2Model, rng: np.random.Generator, rows: Tensor | None
) -> None:
    packed = pack([document(rng, 9)], None)
    expected = all_logits(model, packed)
    zeros = torch.zeros(4, 1176, dtype=torch.float64)
    dummy = replace(packed, pixel_values_PK=zeros, grid_thw=((1, 2, 2),), visual_row_M=rows)
    logits = all_logits(model, dummy)
    assert torch.equal(logits, expected)
    logits.square().sum().backward()
    assert model.visual is not None
    for name, parameter in model.visual.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() == 0, name


def test_the_tower_runs_once_however_many_images(model: Qwen2Model, rng: np.random.Generator) -> None:
    calls: list[int] = []
    assert model.visual is not None
    model.visual.register_forward_hook(lambda *_: calls.append(1))
    item = document(rng, 1, (1, 4, 4), (1, 2, 6), 3)
    model(pack([item, item], pixels(rng, item.grids * 2, torch.float64)))
    assert len(calls) == 1


class PlainCache:
    """Keys and values of one document, attended to by naive softmax."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q_THd: Tensor, k_THd: Tensor, v_THd: Tensor) -> Tensor:
        if layer in self.kept:
            k_THd = torch.cat((self.kept[layer][0], k_THd))
            v_THd = torch.cat((self.kept[layer][1], v_THd))
        self.kept[layer] = (k_THd, v_THd)
        groups = q_THd.shape[1] // k_THd.shape[1]
        k, v = (x.repeat_interleave(groups, 1) for x in (k_THd, v_THd))
        scores = torch.einsum("thd,shd->hts", q_THd, k) * q_THd.shape[-1] ** -0.5
        ahead = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - scores.shape[1] + 1)
        return torch.einsum("hts,shd->thd", scores.masked_fill(ahead, -torch.inf).softmax(-1), v)


def test_a_cache_continues_a_document(model: Qwen2Model, rng: np.random.Generator) -> None:
    item = document(rng, 4, (1, 4, 6), 9)
    packed = pack([item], pixels(rng, item.grids, torch.float64))
    expected = all_logits(model, packed)
    cache, found, length = PlainCache(), [], len(item.ids)
    for start, stop in ((0, 14), (14, 15), (15, length)):
        part = replace(
            packed,
            input_ids_T=packed.input_ids_T[start:stop],
            position_ids_3T=packed.position_ids_3T[:, start:stop],
            cu_seqlens=torch.tensor([0, stop - start], dtype=torch.int32),
            max_seqlen=stop - start,
            pixel_values_PK=packed.pixel_values_PK if start == 0 else None,
        )
        logits = model(part, cache).logits_RV
        assert logits is not None
        found.append(logits)
    assert distance(torch.cat(found), expected) <= 1e-12


def test_what_does_not_fit_is_named(checkpoint: Path, tmp_path: Path, rng: np.random.Generator) -> None:
    args = Qwen2ModelArgs.from_pretrained(checkpoint, dtype="float64", max_tokens_per_mb=20)
    model = Qwen2Model(args)
    item = document(rng, 2, (1, 4, 4), 3)
    packed = pack([item], pixels(rng, [(1, 4, 4)], torch.float64))
    with pytest.raises(StreamError, match=r"22 tokens.*max_tokens_per_mb is 20"):
        model(pack([document(rng, 22)], None))
    with pytest.raises(PlaceholderError, match="4 placeholder tokens in the batch, 6 image embeddings"):
        model(replace(packed, pixel_values_PK=pixels(rng, [(1, 4, 6)], torch.float64), grid_thw=((1, 4, 6),)))
    with pytest.raises(GridError, match="24 patches, the batch 16"):
        model(replace(packed, grid_thw=((1, 4, 6),)))
    with pytest.raises(GridError, match="no whole 2x2 cells"):
        model(replace(packed, grid_thw=((1, 3, 4),)))
    text = Qwen2Model(Qwen2ModelArgs.from_pretrained(saved(text_model(Shape()), tmp_path)))
    with pytest.raises(PlaceholderError, match="no vision tower"):
        text(packed)
