r"""The built-in rewards, against answers that a person graded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from core.rewards.geometry3k import boxed
from core.rewards.pool import RewardPool, Score

THOUGHT = "<think>The angles sum to 180.</think> "


def graded(reward: str, cases: list[tuple[str, dict]], tmp_path: Path, **kwargs: float) -> list[Score]:
    async def go() -> list[Score]:
        pool = RewardPool(reward, directory=tmp_path, workers=1, timeout=20, kwargs=kwargs)
        await pool.start()
        scores = [await pool.grade(["q", text, [1], [2]], row) for text, row in cases]
        await pool.close()
        return scores

    return asyncio.run(asyncio.wait_for(go(), 90))


RIGHT = [
    ("5", "5"),
    ("5.0", "5"),
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac{24}{5}", r"\frac{24}{5}"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"5 \sqrt 2", r"5 \sqrt { 2 }"),
    (r"x = 7", "7"),
    (r"\frac{\sqrt{3}}{2}", r"\frac { \sqrt { 3 } } { 2 }"),
    ("12\\pi", "12 \\pi"),
]
WRONG = [("6", "5"), (r"\sqrt{11}", r"\sqrt{12}"), ("", "5"), ("five", "5"), (r"\frac{1}{0}", "5"), ("}{", "5")]


def test_equal_answers_are_right_however_they_are_written(tmp_path: Path) -> None:
    cases = [(rf"{THOUGHT}\boxed{{{given}}}", {"answer": answer}) for given, answer in RIGHT]
    for (given, answer), score in zip(RIGHT, graded("geometry3k", cases, tmp_path), strict=True):
        assert score.kind is None and score.parts == {"accuracy": 1.0, "format": 1.0}, (given, answer, score)
        assert score.value == pytest.approx(1.0)


def test_other_answers_are_wrong_and_never_an_error(tmp_path: Path) -> None:
    cases = [(rf"{THOUGHT}\boxed{{{given}}}", {"answer": answer}) for given, answer in WRONG]
    for (given, answer), score in zip(WRONG, graded("geometry3k", cases, tmp_path), strict=True):
        assert score.kind is None and score.parts["accuracy"] == 0, (given, answer, score)


def test_format_is_a_part_with_a_weight(tmp_path: Path) -> None:
    row = {"answer": "5"}
    texts = [rf"{THOUGHT}\boxed{{5}}", r"\boxed{5}", rf"{THOUGHT}\boxed{{6}}", "5", r"\boxed{5} <think>late</think>"]
    scores = graded("geometry3k", [(text, row) for text in texts], tmp_path, format_weight=0.25)
    assert [score.value for score in scores] == [1.0, 0.75, 0.25, 0.0, 0.75]


def test_the_last_box_counts_and_braces_are_balanced() -> None:
    assert boxed(r"\boxed{1} then \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert boxed(r"\boxed{1") is None and boxed("none") is None and boxed(r"\boxed{}") == ""


def test_exact_match_wants_the_answer_and_an_end(tmp_path: Path) -> None:
    cases: list[tuple[str, dict]] = [
        ("4", {"answer": "4", "finish_reason": "stop"}),
        (" 4\n", {"answer": 4, "finish_reason": "stop"}),
        ("4", {"answer": "4", "finish_reason": "length"}),
        ("44", {"answer": "4", "finish_reason": "stop"}),
        ("", {"answer": "4", "finish_reason": "stop"}),
    ]
    assert [score.value for score in graded("exact_match", cases, tmp_path)] == [1, 1, 0, 0, 0]
