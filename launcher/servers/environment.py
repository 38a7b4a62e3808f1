"""Which Python a server is started with: the configured one, else that of its container, else the environment made
for it, else ours.

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


def container_of(backend: str, config: Config) -> str | None:
    """The image, as a URI or a path from the root."""
    image = {"vllm": config.paths.vllm_container, "sglang": config.paths.sglang_container}.get(backend)
    return str(Path(image).expanduser().absolute()) if image and is_path(image) else image


def is_path(image: str) -> bool:
    return "://" not in image


def python_of(backend: str, config: Config, device: str) -> str:
    chosen = {"vllm": config.paths.vllm_python, "sglang": config.paths.sglang_python}.get(backend)
    if container_of(backend, config):
        return chosen or "python3"  # as it is called inside
    if chosen:
        return str(Path(chosen).expanduser().absolute())
    found = installed(backend, device, Path(config.paths.cache).expanduser())
    return str(found) if found else sys.executable
