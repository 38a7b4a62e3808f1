"""Bad nodes on a real cluster: each is named before any server starts, and nothing is started."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.slurm_cluster.conftest import Run
from tests.support.runs import ROOT
from tests.support.slurm_cluster.cluster import Cluster, until

pytestmark = pytest.mark.timeout(200)
Start = Callable[..., Run]
SITE = '''"""Imported by every Python of the job: what is wrong with the node it finds itself on."""
import os, sys, time
from pathlib import Path
node, real = os.environ.get("SLURMD_NODENAME"), time.time
if node == os.environ["OUTDATED"]:
    sys.path.insert(0, str(Path(__file__).parent / "versions"))
if node == os.environ["SKEWED"]:
    time.time = lambda: real() + 90
'''
SMI = """#!/bin/sh
if [ "$SLURMD_NODENAME" = "$BUSY" ]; then used=70000; else used=3; fi
for gpu in 0 1 2 3 4 5 6 7; do echo "$gpu, GPU-$SLURMD_NODENAME-$gpu, $used"; done
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A torch of another version, a clock that is off, and an nvidia-smi, each effective on the node named for it."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    other = tmp_path / "versions" / "torch-1.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    return tmp_path


def children_of(job: Run) -> list[str]:
    """Logs of anything but the daemons."""
    return [path.name for path in job.root.glob("logs/1/*/*.log") if path.name != "daemon.log"]


def test_wrong_versions_busy_gpus_and_clock_skew_are_named(run: Start, cluster: Cluster, site: Path) -> None:
    """Without --emulate, since GPUs are looked at only where they are used; no server gets that far."""
    _, outdated, skewed, busy = cluster.shape.names
    job = run(
        "allocation_mode=embedded:d2+archon:d2", "cluster.n_nodes=4", f"slurm.env.PYTHONPATH={site}:{ROOT}",
        f"slurm.env.PATH={site}:{os.environ['PATH']}", f"slurm.env.OUTDATED={outdated}", f"slurm.env.SKEWED={skewed}",
        f"slurm.env.BUSY={busy}",
    )  # fmt: skip
    job.submit(emulate=False)
    error = job.await_phase("failed").error
    assert error is not None and error.process == "preflight"
    said = error.message
    assert f"({outdated}): torch is 1.0, elsewhere" in said
    assert f"({skewed}): its clock is +90 s off" in said
    assert f"({busy}): GPU GPU-{busy}-" in said and "is not free, 70000 MiB are in use" in said
    assert len(said.splitlines()) == 3, said
    assert all(name in job.launcher("status", str(job.root)).expect().out for name in (outdated, skewed, busy))
    assert children_of(job) == []
    job.await_out_of_queue()
    job.nothing_left()
    assert job.state.attempt == 1, "a bad node is no reason for a requeue"


def test_a_run_directory_that_is_not_shared_is_named(run: Start, cluster: Cluster, tmp_path: Path) -> None:
    """One node sees a copy of the run directory in its place, as on a mount of its own."""
    job = run("rollout.setup_timeout=10", "slurm.training.nodelist=" + cluster.shape.names[1])
    with cluster.drained("1-2"):
        job.submit()
        shutil.copytree(job.root, tmp_path / "copy")
        cluster.stop_node(2)
        cluster.start_node(2, mounts=[(tmp_path / "copy", job.root)])
    try:
        error = job.await_phase("failed").error
        assert error is not None and error.process == "preflight"
        assert "training-0: its preflight record was not seen from inference-0" in error.message
        assert "cluster.fileroot must be shared" in error.message
        assert children_of(job) == []
        job.await_out_of_queue()
    finally:
        cluster.stop_node(2)
        cluster.start_node(2)
        until(cluster.all_idle, 60, "every node idle")
    job.nothing_left()
