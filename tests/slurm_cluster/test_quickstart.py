"""The whole quickstart on Slurm: the SFT run as a job of one component, then GRPO as a hetjob, held to its numbers."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from bench.quickstart import FINAL, GAIN
from tests.slurm_cluster.conftest import Run
from tests.support.runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
SITE = ("scheduler.type=slurm", "slurm.cpus_per_node=4", "slurm.mem_per_node=8G", "slurm.time=60", "cluster.n_nodes=2")


def test_the_quickstart_as_a_hetjob(run: Callable[..., Run]) -> None:
    sft, grpo = run(name="-sft"), run(name="-grpo")
    root = sft.shared / "runs"
    places = [f"cluster.fileroot={root}", f"paths.cache={sft.shared / 'cache'}", "trial_name=slurm", "seed=1"]
    data = [f"{name}_dataset.path={sft.shared / 'pictures'}" for name in ("train", "valid")]
    model = str(sft.shared / "quickstart-model")
    sft.launcher("make-model", model, "--untied", "--seed", "1", "--pictures", str(sft.shared / "pictures")).expect()
    submitted = sft.launcher(
        "submit", "--emulate", "--json", str(ROOT / "configs" / "quickstart_sft.yaml"), *SITE, *places, *data,
        f"actor.path={model}",
    )  # fmt: skip
    sft.place = root / "quickstart-sft" / "slurm"
    assert submitted.expect() and sft.await_phase("done", seconds=1200).attempt == 1
    grpo.launcher(
        "submit", "--emulate", "--json", str(ROOT / "configs" / "quickstart.yaml"), *SITE, *places, *data,
        "cluster.n_nodes=3", "cluster.n_gpus_per_node=1", f"actor.path={sft.root / 'hub' / 'latest'}",
    ).expect()  # fmt: skip
    grpo.place = root / "quickstart" / "slurm"
    assert grpo.await_phase("done", seconds=1500).attempt == 1
    assert "#SBATCH hetjob" in (grpo.root / "submitit" / "job.sbatch").read_text()
    summary = json.loads(grpo.launcher("report", str(grpo.root), "--json").expect().out)
    curve = [evaluation["accuracy"] for evaluation in summary["evaluations"]["valid"]]
    assert curve[-1] >= FINAL and curve[-1] - curve[0] >= GAIN, curve
    for each in (sft, grpo):
        each.await_out_of_queue()
        each.nothing_left()
