"""The flags of an inference server, read from its real parser; and whether that parser takes given command lines.

Run with the server's own Python (it has vLLM or SGLang; ours has not):

    PYTHON bench/server_flags.py vllm list > core/config/flags/vllm-0.32.0.json
    PYTHON bench/server_flags.py sglang parse < lines.json      # [[word, …], …] -> [null | "what is wrong", …]

Stands alone: it imports nothing of this project.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib
import io
import json
import sys
from typing import Any


def vllm_parser() -> argparse.ArgumentParser:
    utils = importlib.import_module("vllm.utils.argparse_utils")
    for name in ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args"):
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(name)
            return module.make_arg_parser(utils.FlexibleArgumentParser(prog="vllm serve"))
    raise SystemExit("this vLLM keeps its parser elsewhere: add the place to bench/server_flags.py")


def sglang_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang.launch_server")
    importlib.import_module("sglang.srt.server_args").ServerArgs.add_cli_args(parser)
    return parser


PARSERS = {"vllm": vllm_parser, "sglang": sglang_parser}


def version(backend: str) -> str:
    return importlib.import_module(f"{backend}.version" if backend == "sglang" else backend).__version__


def flags(parser: argparse.ArgumentParser) -> dict[str, dict[str, Any]]:
    """By dest-like name (the longest option, underscored): how it is written on a command line."""
    found: dict[str, dict[str, Any]] = {}
    for action in parser._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        plain = [name for name in names if not name.startswith("--no-")] or names
        if not plain or action.dest == "help":
            continue
        if isinstance(action, argparse.BooleanOptionalAction):
            kind = "both"
        elif action.nargs == 0:
            kind = "switch"
        else:
            kind = "list" if action.nargs in ("+", "*") or isinstance(action.nargs, int) else "value"
        entry: dict[str, Any] = {"flag": plain[0], "kind": kind, "default": plain_value(action.default)}
        if action.choices is not None:
            entry["choices"] = sorted(str(choice) for choice in action.choices)
        for name in plain:
            found[name.removeprefix("--").replace("-", "_")] = entry
    return dict(sorted(found.items()))


def plain_value(value: Any) -> Any:
    """As JSON has it; a default that is computed, or an object, is null: then every value is written out."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, list | tuple) and all(isinstance(item, str | int | float) for item in value):
        return list(value)
    return value if isinstance(value, str | int | float | bool) else None


def refusal(parser: argparse.ArgumentParser, words: list[str]) -> str | None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            parser.parse_args(words)
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1] if said.getvalue().strip() else "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    backend, action = sys.argv[1:3]
    with contextlib.redirect_stdout(sys.stderr):
        parser = PARSERS[backend]()
        name = version(backend)
    if action == "list":
        json.dump({"version": name, "flags": flags(parser)}, sys.stdout, indent=0)
    else:
        json.dump([refusal(parser, words) for words in json.load(sys.stdin)], sys.stdout)
    print()


if __name__ == "__main__":
    main()
