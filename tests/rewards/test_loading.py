"""The question whether a reward can be loaded comes to an end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from core.rewards.loading import load_error

LEAVES_ONE = """
import os, time
if os.fork() == 0:
    os.setsid()
    with open("left", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(100)
    os._exit(0)
while not os.path.exists("left") or not open("left").read():
    time.sleep(0.01)

def score(*args, **row):
    return 1.0
"""


@pytest.mark.timeout(60)
def test_a_module_that_leaves_a_process_with_its_output_behind_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LEAVES_ONE)
    try:
        assert load_error("mine:score", tmp_path, seconds=30) is None
    finally:
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
