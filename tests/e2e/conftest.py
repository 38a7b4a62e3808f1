"""Tiny checkpoint and pictures for whole runs, made once a session by the command that users type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs import Ended, launcher, log_tails


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with `tiny` (a checkpoint) and `pictures` (train, dev, test)."""
    root = tmp_path_factory.mktemp("models")
    launcher("make-model", str(root / "tiny"), "--pictures", str(root / "pictures")).expect()
    return root


@pytest.fixture
def emulate(models: Path, tmp_path: Path) -> Callable[..., tuple[Ended, Path]]:
    """Runs a config under --emulate in a directory of its own; gives what it printed and its run directory."""

    def start(config: str, *overrides: str, trial: str = "t", timeout: float = 110) -> tuple[Ended, Path]:
        ended = launcher(
            "run",
            "--emulate",
            config,
            "experiment_name=e2e",
            f"trial_name={trial}",
            f"cluster.fileroot={tmp_path}",
            f"actor.path={models / 'tiny'}",
            f"paths.cache={tmp_path / 'cache'}",
            *overrides,
            timeout=timeout,
        )
        run = tmp_path / "e2e" / trial
        if ended.status != 0:
            print(log_tails(run))
        return ended, run

    return start


@pytest.fixture
def pictures(models: Path) -> tuple[str, str]:
    """Overrides that name the drawn pictures."""
    return f"train_dataset.path={models / 'pictures'}", f"valid_dataset.path={models / 'pictures'}"
