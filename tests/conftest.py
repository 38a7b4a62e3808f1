"""What every test may use: the real Geometry3K rows where they exist, and the rule that CI skips nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what this machine cannot run by marker, so that nothing is ever skipped."""
    has_rows = bool(os.environ.get("GEOMETRY3K_SAMPLE"))
    has_gpu = os.environ.get("HAS_GPU") == "1"
    expression = config.option.markexpr
    dropped = [
        item
        for item in items
        if (item.get_closest_marker("geometry3k") and not has_rows)
        or (item.get_closest_marker("gpu") and not has_gpu)
        or (item.get_closest_marker("slow") and "slow" not in expression)
    ]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


@pytest.fixture(scope="session")
def geometry3k_sample() -> Path:
    """Directory with train-*.parquet and test-*.parquet, exactly as the hub ships hiyouga/geometry3k."""
    return Path(os.environ["GEOMETRY3K_SAMPLE"])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """With CI=true a skipped test is a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") == "true" and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
