"""The smoke configuration's reward, whose child breaks once: a reward child imports none of our packages, so that it
has to do to itself what core.telemetry.phases does to the other processes.
"""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

_CALLS = itertools.count(1)


def reward(prompt: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    """configs.spread_reward's, at the asked call killed or stopped before it answers."""
    process, _, number, action, mark = os.environ.get("VLM_RL_FAULT", "::0::").split(":", 4)
    if process == "reward-worker" and next(_CALLS) == int(number) and first(mark):
        os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
    return sum(token % 2 == 0 for token in completion_ids) / max(1, len(completion_ids))


def first(mark: str) -> bool:
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL, 0o600))
    except FileExistsError:
        return False
    return True
