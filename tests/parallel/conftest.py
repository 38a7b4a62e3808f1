"""The pool of ranks, the tiny checkpoints, and what one process finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.scene import alone, make_checkpoint
from tests.parallel import jobs
from tests.parallel.pool import Pool


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    started = Pool()
    yield started
    started.stop()


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {name: make_checkpoint(folder / name, tied=name == "tied") for name in ("tied", "untied")}


@pytest.fixture(scope="session")
def one_process() -> Callable[..., dict[str, Any]]:
    """`jobs.measure` on one rank, once for each setting."""
    known: dict[str, dict[str, Any]] = {}

    def measure(**settings: Any) -> dict[str, Any]:
        key = repr(sorted(settings.items()))
        if key not in known:
            known[key] = jobs.measure(alone(), **settings)
        return known[key]

    return measure
