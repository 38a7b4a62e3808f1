"""Position ids of Qwen2-VL's multimodal rope, for one document whose placeholders are expanded.

Owns the arithmetic in numpy, so that both the torch-free side and the trainer get ids from the same code; the rotation
itself is core.ops.rope.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, int, int]


class PlaceholderError(ValueError):
    """Placeholder tokens of a document do not fit its images and videos."""


def mrope_position_ids(
    input_ids: NDArray[np.integer] | Sequence[int],
    grids: Sequence[Grid],
    *,
    image_token_id: int | None,
    video_token_id: int | None,
    merge: int = 2,
    tokens_per_second: float = 1.0,
    seconds_per_grid: Sequence[float] | None = None,
    video_advance: Literal["space", "all"] = "space",
) -> NDArray[np.int64]:
    """Ids on the axes t, h, w; equal on all three for text.

    `grids` lists images and videos in the order of their placeholders, in patches; `seconds_per_grid` the videos only
    (1 each when None). After a video the text goes on behind the larger spatial axis (`space`, transformers 5) or
    behind the largest of all three axes (`all`, transformers 4 and Qwen's own code).
    Raises PlaceholderError when runs of placeholders and grids do not match.
    """
    ids = np.asarray(input_ids, dtype=np.int64)
    kind = np.zeros(ids.shape, dtype=np.int8)
    if image_token_id is not None:
        kind[ids == image_token_id] = 1
    if video_token_id is not None:
        kind[ids == video_token_id] = 2
    if not grids:
        if kind.any():
            raise PlaceholderError(f"document has {int((kind > 0).sum())} placeholder tokens and no image")
        return np.tile(np.arange(ids.size, dtype=np.int64), (3, 1))

    out = np.empty((3, ids.size), dtype=np.int64)
    seconds = iter(seconds_per_grid) if seconds_per_grid is not None else None
    token, position = 0, 0
    for number, (t, h, w) in enumerate(grids):
        start = _next_placeholder(kind, token)
        if start < 0:
            raise PlaceholderError(f"document has {len(grids)} images and placeholders for {number}")
        out[:, token:start] = np.arange(start - token) + position
        position += start - token
        rows, cols = h // merge, w // merge
        token = start + t * rows * cols
        run = kind[start:token]
        if run.size != t * rows * cols or (run != kind[start]).any():
            got = int((kind[start:] == kind[start]).cumprod().sum())
            raise PlaceholderError(
                f"image {number} of grid {t}x{h}x{w} wants {t * rows * cols} placeholders, has {got}"
            )
        is_video = kind[start] == 2
        interval = tokens_per_second * (next(seconds, 1.0) if seconds is not None else 1.0) if is_video else 1.0
        frame = (np.arange(t, dtype=np.float32) * np.float32(interval)).astype(np.int64)  # float32 as transformers
        out[0, start:token] = np.repeat(frame, rows * cols) + position
        out[1, start:token] = np.tile(np.repeat(np.arange(rows), cols), t) + position
        out[2, start:token] = np.tile(np.arange(cols), t * rows) + position
        span = max(rows, cols)
        position += max(span, int(frame[-1]) + 1) if is_video and video_advance == "all" else span
    if _next_placeholder(kind, token) >= 0:
        raise PlaceholderError(f"document has placeholders beyond those of its {len(grids)} images")
    out[:, token:] = np.arange(ids.size - token) + position
    return out


def _next_placeholder(kind: NDArray[np.int8], start: int) -> int:
    """Index of the first placeholder at or after `start`, or -1."""
    found = np.flatnonzero(kind[start:])
    return start + int(found[0]) if found.size else -1
