"""The script of a job, held to golden files; `python -m tests.slurm.test_script` writes them again, for a reviewer."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from core.config import Config, load
from launcher.slurm.script import sbatch_text
from tests.slurm.conftest import RECIPE, job_for

GOLDEN = Path(__file__).parent / "golden"
SITE = (
    "slurm.partition=gpu", "slurm.account=vision", "slurm.time=1-00:00:00", "slurm.gpu_type=h100",
    "slurm.modules=[cuda/12.8]", "slurm.setup=['ulimit -c 0']", "slurm.env.NCCL_DEBUG=WARN",
    "slurm.training.constraint=nvlink&ib", "slurm.training.qos=long", "slurm.inference.mem_per_gpu=48G",
    "slurm.mail_type=END", "slurm.mail_user=me@example.org", "slurm.options.switches=1", "slurm.options.no-kill=true",
    "slurm.comment='two words'", "slurm.container=pyxis", "slurm.container_image=/images/vlm.sqsh",
    "slurm.container_mounts=[/shared:/shared]", "slurm.srun_args=[--cpu-bind=none]", "slurm.chain=3",
    "recover.mode=auto",
)  # fmt: skip
CONTAINER = (
    "slurm.container=apptainer", "slurm.container_image=/images/vlm.sif", "slurm.python=/opt/env/bin/python",
    "slurm.container_mounts=[/shared:/shared,/scratch:/scratch:ro]", "slurm.training.modules=[apptainer/1.3]",
)  # fmt: skip
CASES = {
    "recipe_one_node": ("cluster.n_nodes=1",),
    "recipe_two_nodes": ("cluster.n_nodes=2", "allocation_mode=vllm:d8p1t1+d8p1t1"),
    "large": ("cluster.n_nodes=12", "allocation_mode=sglang:d16t2+archon:d8t4c2"),
    "servers_over_nodes": ("cluster.n_nodes=5", "allocation_mode=sglang:d2t16+archon:d8"),
    "partial_nodes": ("cluster.n_nodes=1", "allocation_mode=vllm:d2+d2"),
    "apptainer": ("cluster.n_nodes=2", "allocation_mode=vllm:d8+d8", *CONTAINER),
    "every_option": ("cluster.n_nodes=2", "allocation_mode=vllm:d8+d8", *SITE),
}


def text_of(config: Config) -> str:
    return sbatch_text(job_for(config))


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str, recipe: Callable[..., Config]) -> None:
    assert text_of(recipe(*CASES[name])) == (GOLDEN / f"{name}.sbatch").read_text()


@pytest.mark.parametrize("name", CASES)
def test_a_script_is_valid_bash(name: str, tmp_path: Path) -> None:
    done = subprocess.run(["bash", "-n", GOLDEN / f"{name}.sbatch"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_a_script_says_is_what_was_asked(recipe: Callable[..., Config]) -> None:
    large = text_of(recipe(*CASES["large"]))
    inference, training = large.split("#SBATCH hetjob")
    assert "--nodes=4\n" in inference and "--nodes=8\n" in training  # 16·2/8 and 8·4·2/8
    assert "--cpus-per-task=64" in inference and "--cpus-per-task=32" in training  # 8 GPUs × scheduling_spec's 8 and 4
    assert "--nodes=8 --ntasks=8 --ntasks-per-node=1 --cpus-per-task=32" in training
    inference, training = text_of(recipe(*CASES["servers_over_nodes"])).split("#SBATCH hetjob")
    assert "--nodes=4\n" in inference and "--nodes=1\n" in training  # 2·16/8 whole nodes
    partial = text_of(recipe(*CASES["partial_nodes"]))
    assert "#SBATCH --gres=gpu:4\n" in partial and partial.count("--gres=gpu:2 --mem=64G") == 2


def test_names_and_paths_with_spaces_and_quotes_stay_one_word(recipe: Callable[..., Config]) -> None:
    config = recipe('slurm.comment="it\'s $(id) `id`"', "slurm.env.ODD='a b;c'", "cluster.n_nodes=1")
    line = next(line for line in text_of(config).splitlines() if "--comment" in line)
    assert shlex.split(line.removeprefix("#SBATCH ")) == ["--comment=it's $(id) `id`"]
    step = next(line for line in text_of(config).splitlines() if line.startswith("step inference"))
    assert "ODD=a b;c" in shlex.split(step.rstrip("\\"))


def test_nothing_of_an_attempt_is_in_the_script_or_the_pickle(recipe: Callable[..., Config]) -> None:
    """fairchem PR 1055: a requeue replays the original pickle and resumes from the same old checkpoint for ever."""
    text = text_of(recipe("cluster.n_nodes=2", "allocation_mode=vllm:d8+d8"))
    assert "attempt=$(" in text and "checkpoint" not in text and "latest" not in text


if __name__ == "__main__":
    for case, overrides in CASES.items():
        with tempfile.TemporaryDirectory() as cache:
            words = [f"paths.cache={cache}", "scheduler.type=slurm", *overrides]
            (GOLDEN / f"{case}.sbatch").write_text(text_of(load(RECIPE, words, on_warning=lambda line: None)))
    sys.exit(0)
