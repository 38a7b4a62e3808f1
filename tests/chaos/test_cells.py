"""One process is killed, stopped or cut off at a named phase; the run ends as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.broken_runs import Cell, Place, break_and_mend, differences, outcome
from tests.chaos.cells import CELLS, CI
from tests.support.runs import launcher

pytestmark = pytest.mark.timeout(420)
Unbroken = Callable[[int], dict[str, Any]]


def check(place: Place, cell: Cell, unbroken: Unbroken) -> None:
    run = break_and_mend(place, cell)
    launcher("audit", str(run)).expect()
    if cell.deterministic:
        found = differences(unbroken(cell.ranks), outcome(run))
        assert not found, "\n".join([cell.name, *found])


@pytest.mark.parametrize("cell", CI, ids=lambda cell: cell.name)
def test_a_run_survives(place: Place, cell: Cell, unbroken: Unbroken) -> None:
    check(place, cell, unbroken)


@pytest.mark.slow
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in CI], ids=lambda cell: cell.name)
def test_a_run_survives_every_other_cell(place: Place, cell: Cell, unbroken: Unbroken) -> None:
    check(place, cell, unbroken)
