"""The tiny model, once, and the unbroken run that every broken one in deterministic mode is compared with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.broken_runs import Cell, Place, mode, outcome, start
from tests.support.runs import launcher, log_tails

FAILED = pytest.StashKey[bool]()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    launcher("make-model", str(root / "tiny"), "--pictures", str(root / "pictures")).expect()
    return root


@pytest.fixture(scope="session")
def whole(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What the run that nobody breaks comes to, by number of ranks; filled as needed by `unbroken`."""
    return {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A failure is shown as it comes, and what the run left behind stays."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
        terminal = item.config.pluginmanager.get_plugin("terminalreporter")
        terminal.write(f"\n{item.name}\n{report.longreprtext}\n", flush=True)
    return report


@pytest.fixture
def place(models: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    yield Place(models, tmp_path)
    if not request.node.stash.get(FAILED, False):
        shutil.rmtree(tmp_path / "chaos", ignore_errors=True)


@pytest.fixture
def unbroken(place: Place, whole: dict[int, dict[str, Any]]):
    def of(ranks: int) -> dict[str, Any]:
        if ranks not in whole:
            ended, run = start(place, f"whole{ranks}", *mode(Cell("", "", "", ranks=ranks)))
            assert ended.status == 0, f"{ended.err}\n{log_tails(run)}"
            whole[ranks] = outcome(run)
        return whole[ranks]

    return of
