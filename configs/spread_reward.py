"""A reward for trying a run out: an untrained model's answers differ in it, so that groups carry a signal.

Owns no notion of a right answer. It is what `reward: module:function` names in smoke.yaml and geometry3k_cpu.yaml.
"""

from typing import Any


def spread(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    """The share of even token ids in the answer."""
    return sum(token % 2 == 0 for token in completion_ids) / max(1, len(completion_ids))
