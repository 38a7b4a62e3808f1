"""Rewards that misbehave, as `reward: tests.e2e.rewards:name` names them."""

from __future__ import annotations

import threading
import zlib
from typing import Any


def _kind(prompt_ids: list[int], completion_ids: list[int]) -> int:
    return zlib.crc32(repr((len(prompt_ids), completion_ids)).encode()) % 4


def misbehave(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> Any:
    """A quarter raises, a quarter hangs, a quarter returns a string; the rest is a number."""
    kind = _kind(prompt_ids, completion_ids)
    if kind == 0:
        raise ValueError("no such answer")
    if kind == 1:
        threading.Event().wait()
    if kind == 2:
        return "a string"
    return sum(completion_ids) % 7 / 7


def always_raises(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    raise ValueError("this reward never works")
