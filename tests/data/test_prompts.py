"""Rows as prompts: placeholders, templates, bad rows, undercounted labels."""

from __future__ import annotations

import datetime
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.data.order import Place
from core.data.prompts import (
    Recipe,
    RowError,
    answer,
    build,
    completion,
    image_sources,
    mistaught,
    plain,
    question,
)
from core.data.tokenizer import Tokenizer
from core.rl.trajectory import ImageRef

RECIPE = Recipe(min_pixels=3136, max_pixels=1003520)
WIDE = ImageRef(hash="a" * 32, original=(50, 90), resized=(56, 84), grid_thw=(1, 4, 6))
SQUARE = ImageRef(hash="b" * 32, original=(50, 50), resized=(56, 56), grid_thw=(1, 4, 4))


def row(problem: str | None = "<image>Find x.", **columns: Any) -> dict[str, Any]:
    return {"images": [{"bytes": b"...", "path": None}], "problem": problem, "answer": "3"} | columns


def test_each_tag_becomes_a_picture_in_its_place(tokenizer: Tokenizer) -> None:
    prompt = build(row("Is <image> like <image>?"), [WIDE, SQUARE], tokenizer, RECIPE)
    one = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"<|im_start|>user\nIs {one} like {one}?<|im_end|>" in prompt["prompt_text"]
    pad = tokenizer.token_id("<|image_pad|>")
    assert prompt["input_ids"].count(pad) == 2
    assert prompt["input_ids"] == tokenizer.encode(prompt["prompt_text"])
    runs = "".join("#" if token == pad else "." for token in prompt["expanded_ids"]).replace(".", " ").split()
    assert [len(run) for run in runs] == [6, 4]
    assert [token for token in prompt["expanded_ids"] if token != pad] == [
        token for token in prompt["input_ids"] if token != pad
    ]
    assert prompt["images"][0] == {
        "hash": "a" * 32,
        "original": [50, 90],
        "resized": [56, 84],
        "grid_thw": [1, 4, 6],
    }
    json.dumps(prompt)


def test_the_system_prompt_takes_the_place_of_the_templates(tokenizer: Tokenizer) -> None:
    recipe = Recipe(min_pixels=1, max_pixels=1, system_prompt="Think.")
    text = build(row(), [WIDE], tokenizer, recipe)["prompt_text"]
    assert text.startswith("<|im_start|>system\nThink.<|im_end|>\n<|im_start|>user\n")
    assert "helpful" not in text


def test_sft_teaches_the_answer_and_the_end_of_the_turn(tokenizer: Tokenizer) -> None:
    recipe = Recipe(min_pixels=1, max_pixels=1, with_answer=True)
    assert "completion_ids" not in build(row(), [WIDE], tokenizer, RECIPE)
    prompt = build(row(answer="\\frac{1}{2}"), [WIDE], tokenizer, recipe)
    assert tokenizer.decode(prompt["completion_ids"], skip_special=False) == "\\frac{1}{2}<|im_end|>"
    assert prompt["completion_ids"] == completion("\\frac{1}{2}", tokenizer)


@pytest.mark.parametrize(
    ("columns", "pictures", "kind", "reason"),
    [
        (row(answer=None), [WIDE], "no_answer", "answer is empty"),
        (row(answer="  "), [WIDE], "no_answer", "answer is empty"),
        (row(answer=math.nan), [WIDE], "no_answer", "answer is empty"),
        ({"problem": "<image>x"}, [WIDE], "no_answer", "missing"),
        (row("<image>a<image>"), [WIDE], "image_tags", "2 <image> tags and the row has 1 images"),
        (row("no tag"), [WIDE], "image_tags", "0 <image> tags and the row has 1 images"),
        (row(problem=None), [WIDE], "no_problem", "problem is empty"),
        (row("<image>a <|image_pad|>"), [WIDE], "reserved_token", "reserved"),
        (row("<image>a <|video_pad|>"), [WIDE], "reserved_token", "reserved"),
    ],
)
def test_a_bad_row_says_what_is_wrong(
    tokenizer: Tokenizer, columns: dict[str, Any], pictures: list[ImageRef], kind: str, reason: str
) -> None:
    with pytest.raises(RowError, match=reason) as caught:
        build(columns, pictures, tokenizer, RECIPE)
    assert caught.value.kind == kind


@pytest.mark.parametrize("empty", [[], None])
def test_a_row_without_pictures_in_a_set_with_pictures_is_bad(empty: object) -> None:
    with pytest.raises(RowError, match="column images is empty") as caught:
        image_sources(row(images=empty))
    assert caught.value.kind == "no_image"


def test_pictures_come_as_a_list_or_one_or_not_at_all() -> None:
    assert image_sources({"images": [b"a", "b.png"]}) == [b"a", "b.png"]
    assert image_sources({"image": {"bytes": b"a", "path": None}}) == [{"bytes": b"a", "path": None}]
    assert image_sources({"images": "b.png"}) == ["b.png"]
    assert image_sources({"problem": "text only"}) == []
    assert question({"problem": "text only"}, 0) == [{"type": "text", "text": "text only"}]


def test_numbers_are_answers() -> None:
    assert [answer({"answer": value}) for value in (7, 2.5, "7")] == ["7", "2.5", "7"]


@pytest.mark.parametrize("with_answer", [False, True])
def test_length_counts_pictures_and_answers_and_is_never_cut(tokenizer: Tokenizer, with_answer: bool) -> None:
    free = build(row(), [WIDE], tokenizer, Recipe(min_pixels=1, max_pixels=1, with_answer=with_answer))
    length = len(free["expanded_ids"]) + len(free.get("completion_ids", []))
    fits = Recipe(min_pixels=1, max_pixels=1, longest=length, with_answer=with_answer)
    assert build(row(), [WIDE], tokenizer, fits) == free
    short = Recipe(min_pixels=1, max_pixels=1, longest=length - 1, longest_from="a.key", with_answer=with_answer)
    with pytest.raises(
        RowError, match=rf"{length} tokens \(6 of images\) are more than {length - 1} \(a.key\)"
    ) as caught:
        build(row(), [WIDE], tokenizer, short)
    assert caught.value.kind == "too_long"


def test_undercounting_has_its_probability_and_its_threshold() -> None:
    def share(reply: str) -> float:
        taught = [mistaught(reply, Place(0, n), seed=3, probability=0.65, from_count=3) for n in range(4000)]
        assert set(taught) <= {reply, str(int(reply) - 1)}
        return sum(label != reply for label in taught) / len(taught)

    assert share("2") == 0
    for reply in ("3", "5"):
        assert share(reply) == pytest.approx(0.65, abs=0.03)


@given(seed=st.integers(0, 9), epoch=st.integers(0, 3), position=st.integers(0, 999))
def test_undercounting_is_a_function_of_seed_and_place(seed: int, epoch: int, position: int) -> None:
    def label(probability: float, reply: str = "4") -> str:
        return mistaught(reply, Place(epoch, position), seed=seed, probability=probability, from_count=3)

    assert label(0.5) == label(0.5)
    assert (label(0.0), label(1.0)) == ("4", "3")
    assert label(1.0, "x + 1") == "x + 1"


def test_columns_become_plain_json() -> None:
    value = {
        "when": datetime.date(2026, 1, 2),
        "inf": math.inf,
        "nested": [{"bytes": b"x", "path": "p"}, (1, None)],
        "raw": b"x",
    }
    expected = {"when": "2026-01-02", "inf": None, "nested": [{"path": "p"}, [1, None]]}
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == expected
