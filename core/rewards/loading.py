"""Can a reward function be loaded? Asked of a child as the run starts it, before there is a run.

Owns the question, its deadline, and what such a child is started with. What a child does is core.rewards.worker's,
grading core.rewards.pool's.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")
_ROOT = str(Path(__file__).parents[2])
_FRAME = re.compile(r'File "([^"<]+)", line (\d+)')
_MOST_BYTES = 1 << 20


def load_error(reward: str, directory: Path, *, seconds: float) -> str | None:
    """Why `module:function` cannot be loaded from `directory`, in a line; None where it can.

    Raises TimeoutError when its module is not imported within `seconds`.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", str(WORKER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # what the module prints at import
        cwd=directory,
        env=environment(),
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(json.dumps({"function": reward, "directory": str(directory)}).encode() + b"\n")
        process.stdin.flush()
        said = _line(process.stdout.fileno(), time.monotonic() + seconds)
    except BrokenPipeError:
        said = b""
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()  # its end, not that of its output: what the module left running may hold that
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
    try:
        answer = json.loads(said)
    except ValueError:
        return "its process ended while importing it"
    return None if "ready" in answer else str(answer["fatal"]) + _place(answer["traceback"])


def _line(handle: int, deadline: float) -> bytes:
    """Up to the end of the first line, or of the output."""
    said = b""
    while not said.endswith(b"\n") and len(said) < _MOST_BYTES:
        if not select.select([handle], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        more = os.read(handle, 65536)
        if not more:
            break
        said += more
    return said


def _place(traceback: str) -> str:
    """` (file:line)` of the innermost frame that is neither the worker's own nor the import system's."""
    found = _FRAME.findall(traceback)
    frames = [each for each in found if Path(each[0]) != WORKER and Path(each[0]).parent.name != "importlib"]
    return f" ({frames[-1][0]}:{frames[-1][1]})" if frames else ""


def environment() -> dict[str, str]:
    """The caller's, without our packages: a user's folder may have a `core` or `models` of its own."""
    ours = dict(os.environ)
    kept = [path for path in ours.pop("PYTHONPATH", "").split(os.pathsep) if path and path != _ROOT]
    if kept:
        ours["PYTHONPATH"] = os.pathsep.join(kept)
    ours.setdefault("OMP_NUM_THREADS", "1")
    return ours
