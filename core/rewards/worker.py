"""The program of a reward child: grades one answer at a time with one function. Run as a file, imports nothing of ours.

It is started as `python -P worker.py`, reads one JSON object a line from its standard input and answers one a line on
what was its standard output; what a reward function prints goes to the log. The first line is the order:
{"function": "module:name" | "/file.py:name", "directory": the user's directory}, answered with {"ready": true} or
{"fatal": message, "traceback": …}; every further one is an answer to grade:
{"id", "args": [prompt, completion, prompt_ids, completion_ids], "kwargs": {…}}, answered with {"id", "value", "parts"}
or {"id", "kind": "raised" | "not_a_number", "message", "traceback"}.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import inspect
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

_PR_SET_PDEATHSIG = 1


class NotANumberError(Exception):
    """The function returned something else than a finite number."""


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "r")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    order = json.loads(requests.readline())
    try:
        function = _load(order["function"], order["directory"])
        accepted = _accepted(function)
    except BaseException as error:
        _write(answers, {"fatal": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
        return
    _write(answers, {"ready": True})
    for line in requests:
        request = json.loads(line)
        _write(answers, {"id": request["id"], **_grade(function, accepted, request)})


def _load(name: str, directory: str) -> Callable[..., Any]:
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ValueError(f"a reward is module:function, not {name!r}")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location("builtin_reward", place)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, directory)
        module = importlib.import_module(place)
    function = getattr(module, attribute)
    if not callable(function):
        raise TypeError(f"{name} is a {type(function).__name__}, not a function")
    return function


def _accepted(function: Callable[..., Any]) -> set[str] | None:
    """The keywords that the function names; None where it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def _grade(function: Callable[..., Any], accepted: set[str] | None, request: dict[str, Any]) -> dict[str, Any]:
    kwargs = request["kwargs"]
    if accepted is not None:
        kwargs = {key: value for key, value in kwargs.items() if key in accepted}
    try:
        value, parts = _number(function(*request["args"], **kwargs))
    except NotANumberError as error:
        return {"kind": "not_a_number", "message": str(error), "traceback": str(error)}
    except BaseException as error:
        return {"kind": "raised", "message": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    return {"value": value, "parts": parts}


def _number(result: Any) -> tuple[float, dict[str, float]]:
    """A number as it is, or a mapping with "reward" whose other entries are parts of it."""
    parts: dict[str, float] = {}
    if isinstance(result, Mapping) and "reward" in result:
        parts = {str(key): _finite(value) for key, value in result.items() if key != "reward"}
        result = result["reward"]
    return _finite(result), parts


def _finite(value: Any) -> float:
    if not isinstance(value, int | float) and hasattr(value, "item"):
        with contextlib.suppress(Exception):
            value = value.item()
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise NotANumberError(f"the reward function returned {value!r:.200}, not a finite number")
    return float(value)


def _write(answers: Any, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
