"""The picture task: what is drawn is what is asked and answered."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from core.data.images import MAX_PIXELS, MIN_PIXELS, load_image
from core.data.pictures import COLOURS, PICTURE_COUNTS, draw, write_pictures
from tests.data.conftest import GEOMETRY_SCHEMA

COUNTS = {"train": 1500, "dev": 40, "test": 600}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    directory = tmp_path_factory.mktemp("pictures")
    write_pictures(directory, seed=1, counts=COUNTS)
    return {split: pq.read_table(directory / f"{split}-00000-of-00001.parquet").to_pylist() for split in COUNTS}


def cells_with(pixels: np.ndarray, colour: str) -> int:
    here = (pixels == COLOURS[colour]).all(axis=2)
    return int(here.reshape(3, 28, 3, 28).any(axis=(1, 3)).sum())


def test_the_answer_is_the_number_of_cells_with_the_asked_colour(sets: dict[str, list[dict]]) -> None:
    for row in sets["test"]:
        pixels = np.asarray(Image.open(io.BytesIO(row["images"][0]["bytes"])))
        colour = row["problem"].removeprefix("<image>How many ").removesuffix(" shapes?")
        asked = cells_with(pixels, colour)
        others = sum(cells_with(pixels, other) for other in COLOURS if other != colour)
        assert row["answer"] == str(asked)
        assert others <= min(4, 5 - asked)


def test_answers_and_colours_are_uniform(sets: dict[str, list[dict]]) -> None:
    answers = Counter(row["answer"] for row in sets["train"])
    assert set(answers) == set("12345")
    # 1500 draws: five standard deviations around a fifth and a third.
    assert all(abs(count - 300) < 5 * 15.5 for count in answers.values())
    problems = Counter(row["problem"] for row in sets["train"])
    assert len(problems) == 3
    assert all(abs(count - 500) < 5 * 18.3 for count in problems.values())


def test_splits_and_seeds_share_no_picture(sets: dict[str, list[dict]]) -> None:
    seen = [row["images"][0]["bytes"] for rows in sets.values() for row in rows]
    # Two pictures with one shape each may agree by chance.
    assert len(set(seen)) >= 0.98 * len(seen)
    assert draw(1, "test", 3)[0].tobytes() != draw(2, "test", 3)[0].tobytes()


def test_a_picture_depends_on_seed_split_and_number_only(tmp_path: Path, sets: dict[str, list[dict]]) -> None:
    write_pictures(tmp_path, seed=1, counts={"test": 5})
    table = pq.read_table(tmp_path / "test-00000-of-00001.parquet")
    assert table.to_pylist() == sets["test"][:5]
    assert table.schema.equals(GEOMETRY_SCHEMA)


def test_a_picture_is_seen_as_it_was_drawn(sets: dict[str, list[dict]]) -> None:
    image = load_image(sets["test"][0]["images"][0], min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)
    assert image.grid_thw == (1, 6, 6)
    assert np.array_equal(image.pixels, np.asarray(draw(1, "test", 0)[0]))


def test_sizes_of_the_sets_are_those_of_the_quickstart() -> None:
    assert PICTURE_COUNTS == {"train": 16_000, "dev": 512, "test": 512}
