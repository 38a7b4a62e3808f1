"""The one-way import rule, the torch-free front end and the sizes that say when two things live in one file."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("launcher", "core", "models")
FORBIDDEN = {"core": {"models", "launcher"}, "models": {"launcher"}, "launcher": set()}
HEAVY = ("torch", "transformers")
TORCH_FREE = (
    *("core.config", "core.rpc", "core.telemetry", "core.rollout", "core.data", "core.rewards", "core.inference"),
    *("core.rl.trajectory", "core.weights.manifest", "core.weights.fetch", "launcher"),
)
MAY_IMPORT_TORCH = ("launcher.node", "launcher.roles", "core.inference.embedded")


def modules(package: str) -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.lineno, node.module or ""


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for _, path in modules(package)
        for line, name in imported(path)
        if name.split(".")[0] in FORBIDDEN[package]
    ]
    assert not wrong, wrong


def test_imports_inside_functions_only_in_the_command_line() -> None:
    wrong = []
    for package in PACKAGES:
        for _, path in modules(package):
            if path == ROOT / "launcher" / "cli.py":
                continue
            for function in ast.walk(ast.parse(path.read_text())):
                if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                    wrong += [
                        f"{path.relative_to(ROOT)}:{node.lineno}"
                        for node in ast.walk(function)
                        if isinstance(node, ast.Import | ast.ImportFrom)
                    ]
    assert not wrong, wrong


def test_front_end_imports_no_torch() -> None:
    names = [
        name
        for package in PACKAGES
        for name, _ in modules(package)
        if any(name == free or name.startswith(free + ".") for free in TORCH_FREE)
        and not any(name == heavy or name.startswith(heavy + ".") for heavy in MAY_IMPORT_TORCH)
        and not name.endswith("__main__")
    ]
    assert len(names) > 40
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        f"    loaded = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "    assert not loaded, f'{name} imports {loaded}'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *names], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_no_file_holds_two_things() -> None:
    large = [
        f"{path.relative_to(ROOT)}: {count} lines"
        for package in PACKAGES
        for _, path in modules(package)
        if (count := path.read_text().count("\n")) > 400
    ]
    assert not large, large
