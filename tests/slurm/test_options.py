"""Every key of the section `slurm` becomes its option: for the whole job, and for one side only."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.config import Config
from core.config.slurm import Ask
from tests.slurm.test_script import text_of

Recipe = Callable[..., Config]
HETJOB = ("cluster.n_nodes=2", "allocation_mode=vllm:d8+d8")
DIRECTIVES = {
    "partition": ("gpu", "--partition=gpu"),
    "account": ("vision", "--account=vision"),
    "qos": ("long", "--qos=long"),
    "time": ("2-12:00:00", "--time=2-12:00:00"),
    "constraint": ("nvlink", "--constraint=nvlink"),
    "reservation": ("course", "--reservation=course"),
    "nodelist": ("n1", "--nodelist=n1"),
    "exclude": ("n2,n3", "--exclude=n2,n3"),
    "gpu_type": ("h100", "--gres=gpu:h100:8"),
    "gpu_form": ("gpus-per-node", "--gpus-per-node=8"),
    "cpus_per_gpu": ("3", "--cpus-per-task=24"),
    "cpus_per_node": ("40", "--cpus-per-task=40"),
    "mem_per_gpu": ("10G", "--mem=80G"),
    "mem_per_node": ("0", "--mem=0"),
    "exclusive": ("true", "--exclusive"),
    "licenses": ("matlab:1", "--licenses=matlab:1"),
    "mail_type": ("END,FAIL", "--mail-type=END,FAIL"),
    "mail_user": ("me@example.org", "--mail-user=me@example.org"),
    "comment": ("mine", "--comment=mine"),
    "options.switches": ("1", "--switches=1"),
}
IN_STEPS = {
    "modules": ("[cuda/12.8]", "module load cuda/12.8\n"),
    "setup": ("[ulimit -c 0]", "ulimit -c 0\n"),
    "env.NCCL_DEBUG": ("WARN", "NCCL_DEBUG=WARN"),
    "srun_args": ("[--cpu-bind=none]", "--cpu-bind=none"),
    "container": ("singularity", "singularity exec --nv "),
    "container_image": ("/i.sqsh", " /i.sqsh "),
    "container_mounts": ("[/a:/b]", "--bind /a:/b"),
}
WITH = {
    "container": ["container_image=/i"],
    "container_image": ["container=singularity"],
    "container_mounts": ["container=singularity", "container_image=/i"],
}
ONCE = ("mail_type", "mail_user")
"""Of the job, not of a side."""


def test_no_key_is_forgotten_here() -> None:
    assert {key.partition(".")[0] for key in [*DIRECTIVES, *IN_STEPS]} == set(Ask.model_fields)


def sides(text: str) -> tuple[str, str]:
    first, second = text.split("#SBATCH hetjob")
    return first, second.split("\n\n")[0] + "\n"


@pytest.mark.parametrize("key", DIRECTIVES)
def test_for_the_whole_job(recipe: Recipe, key: str) -> None:
    value, line = DIRECTIVES[key]
    inference, training = sides(text_of(recipe(*HETJOB, f"slurm.{key}={value}")))
    assert f"#SBATCH {line}\n" in inference
    assert (f"#SBATCH {line}\n" in training) == (key not in ONCE)


@pytest.mark.parametrize("key", [key for key in DIRECTIVES if key not in ONCE])
@pytest.mark.parametrize("side", [0, 1])
def test_for_one_side_only(recipe: Recipe, key: str, side: int) -> None:
    value, line = DIRECTIVES[key]
    parts = sides(text_of(recipe(*HETJOB, f"slurm.{('inference', 'training')[side]}.{key}={value}")))
    assert [f"#SBATCH {line}\n" in part for part in parts] == [side == 0, side == 1]


@pytest.mark.parametrize("key", IN_STEPS)
def test_in_the_step_of_one_side(recipe: Recipe, key: str) -> None:
    value, words = IN_STEPS[key]
    also = [f"slurm.training.{each}" for each in WITH.get(key, [])]
    text = text_of(recipe(*HETJOB, f"slurm.training.{key}={value}", *also))
    steps = text.split("# each step reports")[1].split("left=2")[0]
    inference, training = steps.split("step inference")[1].split(" &\n", 1)
    assert words in training and words not in inference
