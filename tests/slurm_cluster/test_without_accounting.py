"""A site without accounting: sacct fails, and squeue forgets a job after MinJobAge. A run does not need either."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm_cluster.conftest import Run
from tests.support.slurm_cluster.cluster import Cluster, make

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def plain() -> Iterator[Cluster]:
    made = make(Path(tempfile.mkdtemp(prefix="vlmrl-plain-")), nodes=2, accounting=False)
    try:
        yield made.start()
    finally:
        made.stop()


def test_a_hetjob_runs_and_is_cancelled(
    plain: Cluster, run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", plain.environment["SLURM_CONF"])
    job = run("total_train_steps=1")
    job.cluster = plain
    job.submit()
    assert job.await_phase("done").attempt == 1
    assert job.status()["verdict"] == "done"
    job.await_out_of_queue()
    second = run("total_train_steps=1", name="-second")
    second.cluster = plain
    with plain.drained("1-2"):
        leader = second.submit()
        assert second.status()["verdict"] == "pending"
        second.launcher("cancel", str(second.root)).expect()
    assert second.status()["verdict"] == "cancelled"
    assert not plain.call("squeue", "-h", "-j", leader, check=False)
    for each in (job, second):
        each.nothing_left()
