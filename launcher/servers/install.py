"""Makes the environment of an inference server: a virtual environment that holds exactly a recipe.

Owns the order of the steps; what is installed is launcher.servers.recipes'. An environment that is there is left alone;
one that was not finished is made anew; two that want the same one take turns.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from core.config import UserError
from launcher.servers.environment import MADE, directory_of, installed
from launcher.servers.recipes import FILES, RECIPES, Recipe

_STEP_SECS = 3600


class InstallError(UserError):
    """An environment could not be made."""


def install(
    backend: str, device: str, cache: Path, *, pip_arguments: Sequence[str] = (), say: Callable[[str], None] = print
) -> Path:
    """The Python of the environment, made now unless it is there. Raises InstallError."""
    recipe = RECIPES[backend, device]
    directory = directory_of(backend, device, cache)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = installed(backend, device, cache)
        if found is None:
            _refuse_little_room(directory.parent, recipe)
            began = time.monotonic()
            found = _make(recipe, directory, pip_arguments, say)
            say(f"{directory} made in {time.monotonic() - began:.0f} s")
    return found


def _make(recipe: Recipe, directory: Path, pip_arguments: Sequence[str], say: Callable[[str], None]) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    python = directory / "bin" / "python"
    _run([sys.executable, "-m", "venv", str(directory)], "making the virtual environment")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q"]
    add = [*pip, "install", *pip_arguments]
    say(f"installing {recipe.torch}")
    _run([*add, recipe.torch], recipe.torch)
    say(f"installing {FILES / recipe.requirements}")
    _run([*add, "-r", str(FILES / recipe.requirements), recipe.torch], recipe.requirements)
    if recipe.alone:
        say(f"installing {' '.join(recipe.alone)}")
        _run([*add, "--no-deps", *recipe.alone], " ".join(recipe.alone))
    if recipe.not_kept:
        _run([*pip, "uninstall", "-y", *recipe.not_kept], " ".join(recipe.not_kept))
    _copy(recipe, directory)
    _run([str(python), "-P", "-c", _proof(recipe)], f"importing {recipe.backend}")
    (directory / MADE).write_text(recipe.key + "\n")
    return python


def _proof(recipe: Recipe) -> str:
    """A program that fails where the environment is not what it should be."""
    lines = ["import torch"]
    if recipe.device == "cuda":  # an index or folder of CPU wheels that pip knows of wins over the CUDA build
        hint = "give pip another index (--pip) or empty PIP_FIND_LINKS"
        lines.append(f"assert torch.version.cuda, f'torch {{torch.__version__}} has no CUDA: {hint}'")
    return "\n".join([*lines, f"import {recipe.backend}"])


def _copy(recipe: Recipe, directory: Path) -> None:
    """The stand-ins, and the name under which the server looks its own version up."""
    site = next((directory / "lib").glob("python3*")) / "site-packages"
    for name in recipe.copied:
        shutil.copy2(FILES / name, site / name.removesuffix(".txt"))
    for name, old, new in recipe.edits:
        text = (site / name).read_text()
        if text.count(old) != 1:
            raise InstallError(f"install: {site / name} does not say {old!r} once: this edit is for another version")
        (site / name).write_text(text.replace(old, new))
    if recipe.announced:
        name, version = recipe.announced
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def _run(words: Sequence[str], what: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_STEP_SECS, check=False)
    except subprocess.TimeoutExpired:
        raise InstallError(f"install: {what}: not finished after {_STEP_SECS} s") from None
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise InstallError(f"install: {what} failed with status {done.returncode}:\n{tail}")


def _refuse_little_room(place: Path, recipe: Recipe) -> None:
    free = shutil.disk_usage(place).free / 1e9
    if free < recipe.gigabytes:
        raise InstallError(
            f"install: {place} has {free:.1f} GB free, {recipe.backend} for {recipe.device} takes about "
            f"{recipe.gigabytes:g}; name another place with --cache"
        )
