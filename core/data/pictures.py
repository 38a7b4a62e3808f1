"""The quickstart task: how many shapes of one colour does a small picture show?

Owns the drawing and the parquet files, in the schema of hiyouga/geometry3k (images, problem, answer). A picture is a
function of (seed, split, number). Teaching wrong labels on purpose is core.data.prompts' business.
"""

from __future__ import annotations

import io
import math
import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

PICTURE_COUNTS = {"train": 16_000, "dev": 512, "test": 512}
# Pure colours and large shapes: with muted ones two seeds of four had not learned to tell colours after 700 steps.
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
SHAPES = ("circle", "square", "triangle")
CELL, CELLS_A_SIDE, MOST = 28, 3, 5
_ROW_GROUP = 512


def draw(seed: int, split: str, number: int) -> tuple[Image.Image, str, int]:
    """One picture: the image, the colour asked for, and how many shapes have it (1 to 5, uniform)."""
    raw = np.random.PCG64([seed, zlib.crc32(split.encode()), number])

    def below(bound: int) -> int:
        # Of the bit generator only: numpy keeps its stream across versions, but not that of Generator's methods.
        return int(raw.random_raw() >> 11) % bound

    names = list(COLOURS)
    asked = names.pop(below(3))
    count = 1 + below(MOST)
    others = below(min(4, MOST - count) + 1)
    cells = list(range(CELLS_A_SIDE**2))
    image = Image.new("RGB", (CELL * CELLS_A_SIDE,) * 2, "white")
    pen = ImageDraw.Draw(image)
    for n in range(count + others):
        cell = cells.pop(below(len(cells)))
        colour = asked if n < count else names[below(len(names))]
        half = 9 + below(4)
        spare = CELL // 2 - half
        x = cell % CELLS_A_SIDE * CELL + CELL // 2 + below(2 * spare + 1) - spare
        y = cell // CELLS_A_SIDE * CELL + CELL // 2 + below(2 * spare + 1) - spare
        _draw_shape(pen, SHAPES[below(3)], x, y, half, COLOURS[colour])
    return image, asked, count


def _draw_shape(pen: ImageDraw.ImageDraw, shape: str, x: int, y: int, half: int, colour: tuple[int, int, int]) -> None:
    box = (x - half, y - half, x + half - 1, y + half - 1)
    if shape == "circle":
        pen.ellipse(box, fill=colour)
    elif shape == "square":
        pen.rectangle(box, fill=colour)
    else:
        rise = math.floor(half * 0.9)
        pen.polygon([(x, y - rise), (x - half, y + rise), (x + half - 1, y + rise)], fill=colour)


def write_pictures(directory: Path, *, seed: int, counts: Mapping[str, int] = PICTURE_COUNTS) -> list[Path]:
    """Writes `<split>-00000-of-00001.parquet` for every split; returns the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    schema = pa.schema(
        [
            ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
            ("problem", pa.string()),
            ("answer", pa.string()),
        ]
    )
    paths = []
    for split, count in counts.items():
        path = directory / f"{split}-00000-of-00001.parquet"
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")  # another run may be reading the file of that name
        with pq.ParquetWriter(unfinished, schema) as writer:
            for start in range(0, count, _ROW_GROUP):
                rows = [_row(seed, split, n) for n in range(start, min(start + _ROW_GROUP, count))]
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
        unfinished.replace(path)
        paths.append(path)
    return paths


def _row(seed: int, split: str, number: int) -> dict[str, object]:
    image, colour, count = draw(seed, split, number)
    body = io.BytesIO()
    image.save(body, "PNG", compress_level=1)
    return {
        "images": [{"bytes": body.getvalue(), "path": f"{split}-{number}.png"}],
        "problem": f"<image>How many {colour} shapes?",
        "answer": str(count),
    }
