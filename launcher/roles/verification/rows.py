"""Rows of a configuration's training set as documents: the real processing, without a service.

Owns the choice of rows and what is scored of them: the answer, with the end of the turn.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.config import Config
from core.data.images import ImageError, load_image
from core.data.prompts import RowError, build, image_sources
from core.data.tokenizer import Tokenizer
from core.engine.documents import Document
from core.rl.trajectory import ImageRef
from launcher.roles import data


class NoRowsError(Exception):
    """The training set has no usable row."""


def read(config: Config, tokenizer: Tokenizer, count: int) -> tuple[list[Document], dict[str, NDArray[np.uint8]]]:
    """The first `count` usable rows; two of them share their images, as samples of a group do."""
    split = data.splits(config, None)["train"]
    recipe = replace(split.recipe, with_answer=True, longest=None)
    documents: list[Document] = []
    bad: Exception | None = None
    pixels: dict[str, NDArray[np.uint8]] = {}
    for index in range(len(split.rows)):
        if len(documents) >= count:
            break
        row = split.rows[index]
        try:
            pictures = [
                load_image(source, min_pixels=recipe.min_pixels, max_pixels=recipe.max_pixels, root=split.rows.root)
                for source in image_sources(row.columns)
            ]
            facts = [ImageRef(p.hash, p.original, p.resized, p.grid_thw) for p in pictures]
            prompt: dict[str, Any] = build(row.columns, facts, tokenizer, recipe)
        except (RowError, ImageError) as error:
            bad = error
            continue
        pixels |= {picture.hash: picture.pixels for picture in pictures}
        ids = np.array([*prompt["expanded_ids"], *prompt["completion_ids"]], dtype=np.int64)
        images = tuple((picture.hash, picture.grid_thw) for picture in pictures)
        for copy in range(2 if index == 0 else 1):
            name = f"{row.place}/{copy}"
            documents.append(Document(name, ids, len(prompt["expanded_ids"]), images, group=row.place))
    if not documents:
        raise NoRowsError(f"none of {len(split.rows)} rows can be used; the last: {bad}")
    return documents[:count], pixels
