"""Position ids equal those of transformers, token for token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from core.data.mrope import PlaceholderError, mrope_position_ids
from tests.model.checkpoints import IMAGE, VIDEO, Document, Shape, document, vlm


def hf_positions(item: Document, tokens_per_second: int, seconds: list[float] | None = None) -> np.ndarray:
    model = vlm(Shape(tokens_per_second=tokens_per_second)).model
    ids = torch.tensor([item.ids])
    positions, _ = model.get_rope_index(
        ids,
        (ids == IMAGE).int() + 2 * (ids == VIDEO).int(),
        torch.tensor(item.grids) if item.grids else None,
        torch.tensor(item.videos) if item.videos else None,
        None if seconds is None else torch.tensor(seconds),
    )
    return positions[:, 0].numpy()


def ours(item: Document, tokens_per_second: int, **more: object) -> np.ndarray:
    return mrope_position_ids(
        item.ids,
        item.grids + item.videos,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        tokens_per_second=tokens_per_second,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "parts",
    [
        (7,),
        (3, (1, 4, 6), 5),
        ((1, 2, 2), (1, 2, 2)),
        (1, (1, 2, 40), 2, (1, 36, 2), (1, 10, 14), 9),
        (5, (1, 6, 6)),
    ],
)
def test_images_are_placed_as_transformers_does(rng: np.random.Generator, parts: tuple) -> None:
    item = document(rng, *parts)
    np.testing.assert_array_equal(ours(item, 2), hf_positions(item, 2))


@pytest.mark.parametrize("seconds", [None, [0.5], [1.0], [0.3], [2.0]])
@pytest.mark.parametrize("video", ["2x8x8", "8x4x4", "5x2x6"])
@pytest.mark.parametrize("tokens_per_second", [2, 25])
def test_videos_are_placed_as_transformers_does(
    rng: np.random.Generator, video: str, seconds: list[float] | None, tokens_per_second: int
) -> None:
    item = document(rng, 4, video, 6)
    found = ours(item, tokens_per_second, seconds_per_grid=seconds)
    np.testing.assert_array_equal(found, hf_positions(item, tokens_per_second, seconds))


def test_advance_over_all_axes_goes_on_behind_the_longest(rng: np.random.Generator) -> None:
    # Qwen's rule: the next text position is the largest id so far plus one; frames lie 2 apart: 4 + 7 * 2 + 1
    item = document(rng, 3, "8x4x4", 3)
    found = ours(item, 2, video_advance="all")
    inside = 4 + 8 * 2 * 2
    assert found[:, :inside].max() == 4 + 14
    np.testing.assert_array_equal(found[:, inside:], np.arange(19, 19 + 4)[None].repeat(3, 0))


def test_placeholders_without_their_image_are_refused(rng: np.random.Generator) -> None:
    item = document(rng, 3, (1, 4, 4), 2)
    for grids in ([], [(1, 4, 6)], [(1, 2, 4)], [(1, 4, 4), (1, 2, 2)]):
        with pytest.raises(PlaceholderError, match="placeholder"):
            mrope_position_ids(item.ids, grids, image_token_id=IMAGE, video_token_id=VIDEO)
