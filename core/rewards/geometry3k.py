r"""The reward of Geometry3K: is the last \boxed{…} mathematically the row's answer, and is the format kept.

score = (1 - format_weight) * accuracy + format_weight * format; format is 1 for <think>…</think> followed by a boxed
answer. Runs in a reward child, under its caller's deadline: math-verify's own time limits are off.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

# it warns at every call that its own time limits are off
logging.getLogger("math_verify").setLevel(logging.ERROR)

_THOUGHT = re.compile(r"\s*<think>.*?</think>.*\\boxed\{.*\}.*", re.DOTALL)


def reward(
    prompt: str,
    completion: str,
    prompt_ids: list[int],
    completion_ids: list[int],
    *,
    answer: Any,
    format_weight: float = 0.1,
    **row: Any,
) -> dict[str, float]:
    accuracy = float(equal(boxed(completion), str(answer)))
    kept = float(_THOUGHT.fullmatch(completion) is not None)
    return {
        "reward": (1 - format_weight) * accuracy + format_weight * kept,
        "accuracy": accuracy,
        "format": kept,
    }


def boxed(text: str) -> str | None:
    r"""What the last \boxed{…} holds, braces balanced; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for i in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i]
    return None


def equal(given: str | None, answer: str) -> bool:
    if given is None or not given.strip():
        return False
    if given.strip() == answer.strip():
        return True
    return bool(verify(_parsed(answer), _parsed(given), timeout_seconds=None))


def _parsed(text: str) -> list:
    extraction = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return parse(f"\\boxed{{{text}}}", extraction_config=extraction, parsing_timeout=None)
