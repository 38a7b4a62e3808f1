"""A tiny checkpoint, and datasets of rows that a test writes itself."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings
from PIL import Image

from core.data.tokenizer import Tokenizer
from launcher.roles.tiny.checkpoint import TinyModel, write_checkpoint

# Cores are shared: how long an example takes says nothing.
settings.register_profile("shared-cores", deadline=None)
settings.load_profile("shared-cores")

GEOMETRY_SCHEMA = pa.schema(
    [
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
        ("problem", pa.string()),
        ("answer", pa.string()),
    ]
)
WriteRows = Callable[..., Path]


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng([seed, height, width]).integers(0, 256, shape, dtype=np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    body = io.BytesIO()
    image.save(body, kind, **options)
    return body.getvalue()


def picture(height: int = 60, width: int = 80, seed: int = 0) -> bytes:
    return encoded(Image.fromarray(noise(height, width, seed=seed)))


def good_row(seed: int = 0) -> dict[str, Any]:
    return {
        "images": [{"bytes": picture(seed=seed), "path": f"{seed}.png"}],
        "problem": f"<image>Find x in figure {seed}.",
        "answer": str(seed),
    }


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-model")
    write_checkpoint(path, TinyModel())
    return path


@pytest.fixture(scope="session")
def tokenizer(tiny_path: Path) -> Tokenizer:
    return Tokenizer(tiny_path)


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    """Writes rows as `<directory>/<split>-00000-of-00001.parquet` and returns the directory."""

    def write(
        rows: Sequence[Mapping[str, Any]],
        split: str = "train",
        schema: pa.Schema | None = GEOMETRY_SCHEMA,
        row_group_size: int = 4,
    ) -> Path:
        directory = tmp_path / "rows"
        directory.mkdir(exist_ok=True)
        table = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
        pq.write_table(table, directory / f"{split}-00000-of-00001.parquet", row_group_size=row_group_size)
        return directory

    return write
