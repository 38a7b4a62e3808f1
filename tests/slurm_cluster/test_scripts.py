"""The real sbatch takes every script and template; a template's job is a run like any other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from core.rpc.client import Client
from launcher.node.state import read_rendezvous, read_state
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
    """Cut to this cluster where a script asks for what only a site has; one of its nodes may still be coming back."""
    text = (GOLDEN / f"{name}.sbatch").read_text()
    if name in ON_TWELVE_NODES:
        text = text.replace("#SBATCH --nodes=4", "#SBATCH --nodes=1").replace("#SBATCH --nodes=8", "#SBATCH --nodes=2")
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


def send(run: Run, template: str, sizes: tuple[tuple[str, str], ...], folder: Path, *overrides: str) -> str:
    """A template, cut to this cluster, as a user sends it."""
    text = (ROOT / "slurm" / f"{template}.sbatch").read_text()
    for old, new in sizes:
        assert old in text
        text = text.replace(old, new)
    script = folder / f"{template}.sbatch"
    script.write_text(text)
    words = ["sbatch", "--parsable", f"--output={folder}/%j.out", str(script), "--emulate", *run.words, *overrides]
    environment = {**run.cluster.environment, "PYTHON": sys.executable}
    done = subprocess.run(words, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    try:
        until(lambda: read_state(run.run_dir), 60, "the job makes its run directory")
    except AssertionError:
        print("\n".join(path.read_text() for path in folder.glob("*.out")))
        raise
    return done.stdout.strip().split(";")[0]


WHOLE_NODE = "--gres=gpu:8 --cpus-per-task=64 --mem=512G"


def test_the_templates_of_training_run_to_their_end(run: Callable[..., Run], tmp_path: Path) -> None:
    """They start the same daemons; side by side, since one waits for what the other does not need."""
    het, one = run("total_train_steps=2", name="-het"), run("total_train_steps=2", name="-one")
    small = (("--gres=gpu:8 --cpus-per-task=32 --mem=256G", "--gres=gpu:1 --cpus-per-task=4 --mem=4G"),)
    send(het, "grpo_hetjob", (*small, ("CPUS=(32 32)", "CPUS=(4 4)")), tmp_path)
    halves = ("--gres=gpu:4 --mem=256G", "--gres=gpu:1 --mem=4G")
    node = (WHOLE_NODE, "--gres=gpu:2 --cpus-per-task=8 --mem=8G")
    leader = send(
        one, "one_node", (node, ("CPUS=(32 32)", "CPUS=(4 4)"), halves), tmp_path, "cluster.n_gpus_per_node=2"
    )
    for job in (het, one):
        assert job.await_phase("done").attempt == 1
        assert [each["step"] for each in job.steps] == [1, 2]
        assert job.status()["verdict"] == "done"
        job.await_out_of_queue()
        job.nothing_left()
    records = [json.loads(path.read_text()) for path in one.root.glob("logs/1/preflight/*.json")]
    assert len({record["host"] for record in records}) == 1 and len(records) == 2
    given = [gpu["name"] for record in records for gpu in record["gpus"]]
    assert len(given) == len(set(given)) == 2, "each step has a GPU of its own"
    states = one.cluster.call("sacct", "-n", "-X", "-P", "-o", "State", "-j", leader)
    assert states == "COMPLETED"


def test_servers_alone_on_several_nodes(run: Callable[..., Run], tmp_path: Path) -> None:
    job = run()
    sizes = (
        (WHOLE_NODE, "--gres=gpu:1 --cpus-per-task=4 --mem=4G"),
        ("CPUS=(64)", "CPUS=(4)"),
        ("--gres=gpu:8 --mem=512G", "--gres=gpu:1 --mem=4G"),
    )
    leader = send(job, "serve", sizes, tmp_path, "allocation_mode=embedded:d2")
    rendezvous = until(lambda: read_rendezvous(job.run_dir, 1), 60, "the lead daemon")
    client = Client(rendezvous.daemon, job.run_dir.read_token(), timeout=20)
    up = lambda: [each for each in client.get("/registry")["servers"] if each["state"] == "up"]  # noqa: E731
    until(lambda: len(up()) == 2, 90, "both servers are up", poll=0.5)
    assert len({each["url"].split(":")[1] for each in up()}) == 2, "an address of its own on each node"
    said = job.launcher("status", str(job.root)).expect().out
    assert leader in said and all(each["url"] in said for each in up()), "status says where they answer"
    for each in up():
        server = Client(each["url"], job.run_dir.read_token(), timeout=60)
        answer = server.post("/generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 4}})
        assert len(answer["output_ids"]) >= 1
        server.close()
    assert "cancelled" in job.launcher("cancel", str(job.root)).expect().out
    job.await_out_of_queue()
    job.nothing_left()
