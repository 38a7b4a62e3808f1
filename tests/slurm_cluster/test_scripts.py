"""The real sbatch takes every script and template; a template's job is a run like any other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.node.state import read_state
from tests.slurm.test_script import CASES
from tests.slurm_cluster.conftest import Run
from tests.support.runs import ROOT
from tests.support.slurm_cluster.cluster import Cluster, until

pytestmark = pytest.mark.timeout(240)
GOLDEN = ROOT / "tests" / "slurm" / "golden"
TEMPLATES = sorted((ROOT / "slurm").glob("*.sbatch"))
ON_TWELVE_NODES = ("large",)
ABSENT_HERE = ("partition=gpu", "account", "qos", "gpu:h100", "constraint", "mail")


def test_only(cluster: Cluster, path: Path) -> subprocess.CompletedProcess[str]:
    words = ["sbatch", "--test-only", str(path)]
    return subprocess.run(words, env=cluster.environment, capture_output=True, text=True, timeout=60, check=False)


test_only.__test__ = False  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", CASES)
def test_sbatch_accepts_every_generated_script(cluster: Cluster, name: str, tmp_path: Path) -> None:
    """Cut to this cluster where a script asks for what only a site has: its size, partitions, GPU types."""
    text = (GOLDEN / f"{name}.sbatch").read_text()
    if name in ON_TWELVE_NODES:
        text = text.replace("#SBATCH --nodes=4", "#SBATCH --nodes=1").replace("#SBATCH --nodes=8", "#SBATCH --nodes=3")
    text = text.replace("gpu:h100:", "gpu:").replace("--partition=gpu", "--partition=main")
    text = (
        text.replace("'nvlink&ib'", "fake")
        .replace("#SBATCH --qos=long\n", "")
        .replace("#SBATCH --account=vision\n", "")
    )
    path = tmp_path / f"{name}.sbatch"
    path.write_text(text)
    done = test_only(cluster, path)
    assert done.returncode == 0, done.stderr
    assert "to start at" in done.stderr


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_sbatch_accepts_every_template(cluster: Cluster, template: Path) -> None:
    done = test_only(cluster, template)
    assert done.returncode == 0, done.stderr


def test_a_template_starts_the_same_daemons(run: Callable[..., Run], tmp_path: Path) -> None:
    job = run("total_train_steps=2")
    text = (ROOT / "slurm" / "grpo_hetjob.sbatch").read_text()
    small = text.replace("--gres=gpu:8 --cpus-per-task=32 --mem=256G", "--gres=gpu:1 --cpus-per-task=4 --mem=4G")
    script = tmp_path / "grpo_hetjob.sbatch"
    script.write_text(small.replace("CPUS=(32 32)", "CPUS=(4 4)"))
    words = ["sbatch", "--parsable", f"--output={tmp_path}/%j.out", str(script), "--emulate", *job.words]
    environment = {**job.cluster.environment, "PYTHON": command_python()}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    try:
        until(lambda: read_state(job.run_dir), 60, "the job makes its run directory")
        assert job.await_phase("done").attempt == 1
    except AssertionError:
        print("\n".join(path.read_text() for path in tmp_path.glob("*.out")))
        raise
    assert [each["step"] for each in job.steps] == [1, 2]
    assert job.status()["verdict"] == "done"
    job.await_out_of_queue()
    job.nothing_left()


def command_python() -> str:
    return sys.executable
