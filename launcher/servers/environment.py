"""Which Python a server is started with: the configured one, else the environment made for it, else ours.

Looks only; launcher.servers.install makes environments.
"""

from __future__ import annotations

import sys
from pathlib import Path

from core.config import Config
from launcher.servers.recipes import RECIPES

MADE = ".made"


def directory_of(backend: str, device: str, cache: Path) -> Path:
    return cache / "servers" / RECIPES[backend, device].key


def installed(backend: str, device: str, cache: Path) -> Path | None:
    """Its Python, where that environment was made to the end."""
    directory = directory_of(backend, device, cache)
    return directory / "bin" / "python" if (directory / MADE).exists() else None


def python_of(backend: str, config: Config, device: str) -> str:
    chosen = {"vllm": config.paths.vllm_python, "sglang": config.paths.sglang_python}.get(backend)
    if chosen:
        return str(Path(chosen).expanduser().absolute())
    found = installed(backend, device, Path(config.paths.cache).expanduser())
    return str(found) if found else sys.executable
