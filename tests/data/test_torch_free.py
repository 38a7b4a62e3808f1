"""What runs beside the ranks starts without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import core.data

MODULES = sorted(
    f"core.data.{file.stem}" for file in Path(core.data.__path__[0]).glob("*.py") if file.stem != "__init__"
)


def loaded_by(module: str) -> set[str]:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


@pytest.mark.parametrize("modules", [", ".join(MODULES), "launcher.roles.make_model", "launcher.roles.data"])
def test_the_data_side_imports_no_torch(modules: str) -> None:
    assert not loaded_by(modules) & {"torch", "transformers", "models"}


def test_a_child_that_decodes_pictures_loads_little() -> None:
    assert not loaded_by("core.data.image_worker") & {"torch", "pyarrow", "aiohttp", "tokenizers", "pydantic", "scipy"}
