"""Children that grade answers: killed at their deadline, started again, every failure counted by kind.

Owns the children and nothing of what they run (core.rewards.worker runs it). A failed answer scores 0; what to do about
many failures in a row is the collector's. A child that dies over an answer, or is found stopped, says nothing of the
answer: another one grades it, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from core.rewards.loading import WORKER, environment
from core.telemetry.phases import is_stopped

_HERE = Path(__file__).parent
BUILTIN = {name: f"{_HERE / name}.py:reward" for name in ("geometry3k", "exact_match")}
_LINE_LIMIT = 64 << 20


class RewardFunctionError(Exception):
    """The reward function cannot be loaded at all."""


@dataclass(frozen=True)
class Score:
    """`kind` names the failure (raised | timeout | not_a_number), for which the value is 0."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    kind: str | None = None
    message: str = ""
    traceback: str = ""


class _After(Enum):
    """What became of a child."""

    ALIVE = "alive"
    HUNG = "hung"
    LOST = "lost"


@dataclass(eq=False)
class _Child:
    process: asyncio.subprocess.Process
    requests: int = 0

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class RewardPool:
    def __init__(
        self,
        reward: str,
        *,
        directory: Path,
        workers: int = 2,
        timeout: float = 30.0,
        kwargs: Mapping[str, Any] | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        self._function = BUILTIN.get(reward, reward)
        self._reward = reward
        self._directory = str(directory)
        self._workers = workers
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._kwargs = dict(kwargs or {})
        self._idle: asyncio.Queue[_Child | None] = asyncio.Queue()
        self._children: set[_Child] = set()
        self.restarts = 0

    async def start(self) -> None:
        """Starts one child at once, so that a function that cannot be loaded is known before anything is sampled."""
        self._idle.put_nowait(await self._start_child())
        for _ in range(self._workers - 1):
            self._idle.put_nowait(None)

    async def grade(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Score:
        """Scores one answer: args = prompt, completion, prompt_ids, completion_ids; kwargs = the row."""
        child = await self._idle.get()
        try:
            if child is None:
                child = await self._start_child()
            row = {**kwargs, **self._kwargs}
            score, after = await self._ask(child, args, row)
            if after is _After.LOST:
                await self._drop(child)
                self.restarts += 1
                child = None
                child = await self._start_child()
                score, after = await self._ask(child, args, row)
        except BaseException:
            await self._drop(child)
            self._idle.put_nowait(None)
            raise
        if after is not _After.ALIVE:
            await self._drop(child)
            self.restarts += 1
            child = None
        self._idle.put_nowait(child)
        return score

    async def close(self) -> None:
        for child in list(self._children):
            await self._drop(child)

    async def _ask(self, child: _Child, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Score, _After]:
        child.requests += 1
        line = json.dumps({"id": child.requests, "args": list(args), "kwargs": kwargs}) + "\n"
        try:
            async with asyncio.timeout(self._timeout):
                answer = await self._exchange(child, line)
        except TimeoutError:
            message = f"{self._reward} gave no answer within {self._timeout:g} s and was killed"
            after = _After.LOST if is_stopped(child.process.pid) else _After.HUNG
            return Score(0.0, kind="timeout", message=message, traceback=message), after
        if answer is None or answer.get("id") != child.requests:
            code = child.process.returncode
            message = f"{self._reward} ended its process" + (f" (exit {code})" if code is not None else "")
            return Score(0.0, kind="raised", message=message, traceback=message), _After.LOST
        if "kind" in answer:
            failed = {name: answer[name] for name in ("kind", "message", "traceback")}
            return Score(0.0, **failed), _After.ALIVE
        return Score(answer["value"], answer["parts"]), _After.ALIVE

    async def _exchange(self, child: _Child, line: str) -> dict[str, Any] | None:
        assert child.process.stdin is not None and child.process.stdout is not None
        try:
            child.process.stdin.write(line.encode())
            await child.process.stdin.drain()
            answer = await child.process.stdout.readline()
            return json.loads(answer) if answer.endswith(b"\n") else None
        except (ConnectionError, ValueError):
            return None

    async def _start_child(self) -> _Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            str(WORKER),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment(),
            cwd=self._directory,
            start_new_session=True,
            limit=_LINE_LIMIT,
        )
        child = _Child(process)
        self._children.add(child)
        order = json.dumps({"function": self._function, "directory": self._directory}) + "\n"
        try:
            async with asyncio.timeout(self._start_timeout):
                answer = await self._exchange(child, order)
        except TimeoutError:
            answer = {"fatal": f"its module was not imported within {self._start_timeout:g} s"}
        except BaseException:
            await self._drop(child)
            raise
        if answer is None or "fatal" in answer:
            await self._drop(child)
            reason = answer["fatal"] if answer else f"its process ended (exit {process.returncode}) while importing"
            detail = (answer or {}).get("traceback", "")
            raise RewardFunctionError(
                f"reward: {self._reward} cannot be loaded: {reason}\n"
                f"  it is looked for in {self._directory} first; built in are {', '.join(sorted(BUILTIN))}\n{detail}"
            )
        return child

    async def _drop(self, child: _Child | None) -> None:
        if child is None or child not in self._children:
            return
        self._children.discard(child)
        child.kill()
        if child.process.stdin is not None:
            child.process.stdin.close()
        await child.process.wait()
