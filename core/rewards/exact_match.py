"""Reward 1 for an answer that ended and is, white space aside, exactly the row's answer. Runs in a reward child."""

from __future__ import annotations

from typing import Any


def reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    answer: Any,
    finish_reason: str = "stop",
    **row: Any,
) -> float:
    return float(finish_reason == "stop" and completion.strip() == str(answer).strip())
