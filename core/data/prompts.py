"""A dataset row as a prompt: ids for the server, ids for the trainer, and what is wrong with a bad row.

Owns the meaning of columns and the counting of placeholders. Pictures come in as facts (ImageRef), processed
elsewhere; nothing here touches pixels or files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from core.data.images import image_tokens
from core.data.order import Place
from core.data.tokenizer import Tokenizer
from core.rl.trajectory import ImageRef

IMAGE_TAG = "<image>"
_PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>")


class RowError(Exception):
    """A row that cannot be used. `kind` is what it is counted under."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Recipe:
    """How the rows of a split become prompts."""

    min_pixels: int
    max_pixels: int
    system_prompt: str | None = None
    longest: int | None = None  # tokens of the expanded prompt (with its answer for sft)
    longest_from: str = "max_length"  # the key that the limit comes from, for the message
    with_answer: bool = False  # sft: completion_ids are the answer and the end of the turn


def image_sources(columns: Mapping[str, Any]) -> list[Any]:
    """The row's pictures in order, as core.data.images.load_image takes them.

    Raises RowError for a row whose set has pictures and that has none.
    """
    name = next((name for name in ("images", "image") if name in columns), None)
    if name is None:
        return []
    value = columns[name]
    found = list(value) if isinstance(value, list | tuple) else [] if value is None else [value]
    if not found:
        raise RowError("no_image", f"column {name} is empty")
    return found


def question(columns: Mapping[str, Any], images: int) -> list[dict[str, str]]:
    """The user's turn: text and pictures in place of their tags. Raises RowError when tags and pictures differ."""
    text = columns.get("problem")
    if not isinstance(text, str) or not text.strip():
        raise RowError("no_problem", "column problem is empty or missing")
    tags = text.count(IMAGE_TAG)
    if tags != images:
        raise RowError("image_tags", f"problem has {tags} {IMAGE_TAG} tags and the row has {images} images")
    parts: list[dict[str, str]] = []
    for piece in re.split(f"({IMAGE_TAG})", text):
        if piece == IMAGE_TAG:
            parts.append({"type": "image"})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def answer(columns: Mapping[str, Any]) -> str:
    """The row's answer as text. Raises RowError when there is none."""
    value = columns.get("answer")
    if isinstance(value, bool | int | float) and not (isinstance(value, float) and math.isnan(value)):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise RowError("no_answer", "column answer is empty or missing")
    return value


def build(
    columns: Mapping[str, Any], pictures: Sequence[ImageRef], tokenizer: Tokenizer, recipe: Recipe
) -> dict[str, Any]:
    """The part of a prompt that does not depend on where it stands in an epoch. Raises RowError."""
    reply = answer(columns)
    messages: list[dict[str, Any]] = [{"role": "user", "content": question(columns, len(pictures))}]
    if recipe.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": recipe.system_prompt})
    text = tokenizer.render(messages)
    input_ids = tokenizer.encode(text)
    prompt: dict[str, Any] = {
        "input_ids": input_ids,
        "expanded_ids": expanded(input_ids, pictures, tokenizer),
        "images": [picture.to_json() for picture in pictures],
        "row": {name: plain(value) for name, value in columns.items() if name not in ("images", "image")},
        "prompt_text": text,
    }
    if recipe.with_answer:
        prompt["completion_ids"] = completion(reply, tokenizer)
    _require_short(prompt, recipe)
    return prompt


def completion(reply: str, tokenizer: Tokenizer) -> list[int]:
    """The ids that SFT teaches for an answer."""
    return [*tokenizer.encode(reply), tokenizer.end_of_turn]


def expanded(input_ids: Sequence[int], pictures: Sequence[ImageRef], tokenizer: Tokenizer) -> list[int]:
    """The ids with each picture's placeholder repeated once for each of its tokens.

    Raises RowError when the text itself contains a placeholder.
    """
    image_pad, video_pad = (tokenizer.token_id(token) for token in _PLACEHOLDERS)
    if input_ids.count(image_pad) != len(pictures) or video_pad in input_ids:
        raise RowError("reserved_token", f"the text contains one of the reserved tokens {', '.join(_PLACEHOLDERS)}")
    ids: list[int] = []
    coming = iter(pictures)
    for token in input_ids:
        ids += [token] * image_tokens(next(coming).grid_thw) if token == image_pad else [token]
    return ids


def _require_short(prompt: Mapping[str, Any], recipe: Recipe) -> None:
    length = len(prompt["expanded_ids"]) + len(prompt.get("completion_ids", ()))
    if recipe.longest is not None and length > recipe.longest:
        of_images = length - len(prompt["input_ids"]) - len(prompt.get("completion_ids", ())) + len(prompt["images"])
        raise RowError(
            "too_long",
            f"{length} tokens ({of_images} of images) are more than {recipe.longest} ({recipe.longest_from}); "
            "raise it, or lower train_dataset.dataset_kwargs.max_pixels",
        )


def mistaught(reply: str, place: Place, *, seed: int, probability: float, from_count: int) -> str:
    """The answer of an annotator who undercounts: from `from_count` on, one less with `probability`.

    A function of the seed and the prompt's place; an answer that is not a whole number stays.
    """
    if not reply.isascii() or not reply.isdigit() or int(reply) < from_count:
        return reply
    word = int(np.random.PCG64([seed, place.epoch, place.position, 0x6D15]).random_raw())
    return str(int(reply) - 1) if word < probability * 2.0**64 else reply


def plain(value: Any) -> Any:
    """A column's value as JSON can carry it: bytes go, dates become text, numbers that are not finite become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items() if not isinstance(entry, bytes)}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value if not isinstance(entry, bytes)]
    return None if isinstance(value, bytes) else str(value)
