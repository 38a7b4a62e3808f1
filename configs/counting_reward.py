"""The reward of the quickstart's counting task, as a user writes one: `reward: module:function` in quickstart.yaml."""

from typing import Any


def exact(
    prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], *, answer: str, **row: Any
) -> float:
    """1 when the whole answer is the right digit."""
    return float(completion.strip() == answer.strip())
