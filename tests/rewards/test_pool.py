"""Reward children: every kind of failure, killed at the deadline, the user's own packages first."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from core.rewards.pool import RewardFunctionError, RewardPool, Score

ARGS = ["the prompt", "the answer", [1, 2], [3]]

FUNCTIONS = """
import math, os, time, numpy
def length(prompt, completion, prompt_ids, completion_ids, **row): return len(completion) + len(row["extra"])
def raising(prompt, completion, prompt_ids, completion_ids, **row): raise ValueError("bad " + completion)
def hanging(prompt, completion, prompt_ids, completion_ids, **row):
    while True: time.sleep(1)
def stubborn(prompt, completion, prompt_ids, completion_ids, **row):
    while True:
        try: time.sleep(1)
        except BaseException: pass
def a_string(prompt, completion, prompt_ids, completion_ids, **row): return "1.0"
def none(prompt, completion, prompt_ids, completion_ids, **row): return None
def nan(prompt, completion, prompt_ids, completion_ids, **row): return math.nan
def infinite(prompt, completion, prompt_ids, completion_ids, **row): return -math.inf
def leaving(prompt, completion, prompt_ids, completion_ids, **row): os._exit(3)
def exiting(prompt, completion, prompt_ids, completion_ids, **row): raise SystemExit(0)
def printing(prompt, completion, prompt_ids, completion_ids, **row):
    print('{"id": 1, "value": 99, "parts": {}}', flush=True); os.write(1, b"raw"); return 0.5
def a_bool(prompt, completion, prompt_ids, completion_ids, **row): return True
def from_numpy(prompt, completion, prompt_ids, completion_ids, **row): return numpy.float32(0.25)
def parts(prompt, completion, prompt_ids, completion_ids, **row): return {"reward": 0.5, "accuracy": 1, "format": 0}
def named(prompt, completion, prompt_ids, completion_ids, answer): return float(answer)
def reading(prompt, completion, prompt_ids, completion_ids, **row): return float(input() or 0)
class Callable:
    def __call__(self, prompt, completion, prompt_ids, completion_ids, **row): return 0.75
instance = Callable()
"""


def graded(
    root: Path, function: str, use: Callable[[RewardPool], Awaitable[None]] | None = None, *, timeout: float = 20.0
) -> Score:
    (root / "scores.py").write_text(FUNCTIONS)

    async def go() -> Score:
        pool = RewardPool(function, directory=root, workers=1, timeout=timeout)
        await pool.start()
        try:
            if use is not None:
                await use(pool)
            return await pool.grade(ARGS, {"answer": "4", "extra": "xyz"})
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize(
    ("name", "value"),
    [("length", 13), ("a_bool", 1), ("from_numpy", 0.25), ("printing", 0.5), ("named", 4), ("instance", 0.75)],
)
def test_a_number_is_the_score(tmp_path: Path, name: str, value: float) -> None:
    assert graded(tmp_path, f"scores:{name}") == Score(value)


def test_parts_go_with_the_score(tmp_path: Path) -> None:
    assert graded(tmp_path, "scores:parts") == Score(0.5, {"accuracy": 1.0, "format": 0.0})


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("raising", "raised", "ValueError: bad the answer"),
        ("exiting", "raised", "SystemExit"),
        ("leaving", "raised", "ended its process"),
        ("reading", "raised", "EOFError"),
        ("a_string", "not_a_number", "'1.0'"),
        ("none", "not_a_number", "None"),
        ("nan", "not_a_number", "nan"),
        ("infinite", "not_a_number", "-inf"),
    ],
)
def test_a_failure_scores_zero_under_its_kind(tmp_path: Path, name: str, kind: str, message: str) -> None:
    score = graded(tmp_path, f"scores:{name}")
    assert score.value == 0 and score.kind == kind and message in score.message
    if name == "raising":
        assert "scores.py" in score.traceback, "the user sees the line"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_child_that_is_killed_or_stopped_costs_no_score(tmp_path: Path, how: signal.Signals) -> None:
    async def use(pool: RewardPool) -> None:
        (child,) = psutil.Process().children()
        child.send_signal(how)
        score = await pool.grade(ARGS, {"extra": "xyz"})
        assert score == Score(13) and pool.restarts == 1

    assert graded(tmp_path, "scores:length", use, timeout=2.0) == Score(13)


@pytest.mark.parametrize("name", ["hanging", "stubborn"])
def test_one_that_hangs_is_killed_at_the_deadline_and_its_worker_replaced(tmp_path: Path, name: str) -> None:
    pids: list[int] = []

    async def use(pool: RewardPool) -> None:
        before = time.monotonic()
        score = await pool.grade(ARGS, {"extra": ""})
        assert (score.value, score.kind) == (0.0, "timeout") and time.monotonic() - before < 5
        pids.extend(child.pid for child in psutil.Process().children())
        assert pids == [], "the child is gone"

    assert graded(tmp_path, f"scores:{name}", use, timeout=0.3).kind == "timeout", "a second one is graded, too"


def test_no_child_outlives_the_process_that_started_it(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text(FUNCTIONS)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:

            async def start() -> None:
                pool = RewardPool("scores:hanging", directory=tmp_path, workers=1)
                await pool.start()
                asyncio.get_running_loop().call_later(0.2, os._exit, 0)
                (child,) = psutil.Process().children()
                os.write(writer, str(child.pid).encode())
                await pool.grade(ARGS, {})

            asyncio.run(start())
        finally:
            os._exit(1)
    os.close(writer)
    child = int(os.read(reader, 20))
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the hanging reward survived"
        time.sleep(0.02)


def test_the_users_own_folder_comes_first_even_under_our_names(tmp_path: Path) -> None:
    for package in ("core", "models"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("mine = 0.125\n")
    (tmp_path / "scores2.py").write_text(
        "import sys, core, models\n"
        "def reward(prompt, completion, prompt_ids, completion_ids, **row):\n"
        "    assert not any(name.split('.')[0] == 'launcher' for name in sys.modules)\n"
        "    return core.mine + models.mine\n"
    )
    assert graded(tmp_path, "scores2:reward") == Score(0.25)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("nowhere:reward", "ModuleNotFoundError"),
        ("scores:nothing", "AttributeError"),
        ("scores:math", "not a function"),
        ("geometry4k", "module:function"),
    ],
)
def test_a_function_that_is_not_there_is_named_before_anything_is_graded(
    tmp_path: Path, function: str, reason: str
) -> None:
    with pytest.raises(RewardFunctionError, match=reason) as caught:
        graded(tmp_path, function)
    assert str(tmp_path) in str(caught.value) and "geometry3k" in str(caught.value)


def test_a_module_that_does_not_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(RewardFunctionError, match="ZeroDivisionError"):
        graded(tmp_path, "broken:reward")


def test_many_answers_are_graded_at_once_and_each_gets_its_own_score(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text(FUNCTIONS)

    async def go() -> None:
        pool = RewardPool("scores:named", directory=tmp_path, workers=2)
        await pool.start()
        scores = await asyncio.gather(*(pool.grade(ARGS, {"answer": i}) for i in range(200)))
        assert [score.value for score in scores] == list(range(200))
        await pool.close()

    asyncio.run(asyncio.wait_for(go(), 60))
