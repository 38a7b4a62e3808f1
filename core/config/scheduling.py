"""`scheduling_spec` and `scheduling_strategy` of actor, ref, critic and rollout: what a process of it is given."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from core.config.base import ANYTHING, Foreign, Section


class SchedulingStrategy(Section):
    type: Literal["separation", "colocation"] = "separation"
    target: str | None = None

    foreign: ClassVar[dict[str, Foreign]] = {"fork": Foreign(True)}


class SchedulingSpec(Section):
    """Means what it says; the section `slurm` wins over it."""

    cpu: Annotated[int, Field(ge=1)] = 8
    gpu: Annotated[int, Field(ge=0)] = 0
    mem: Annotated[int, Field(ge=1)] = 32
    port_count: Annotated[int, Field(ge=0)] = 2
    image: str | None = "/storage/openpsi/images/areal-latest.sif"
    task_type: Literal["worker", "engine"] = "worker"
    env_vars: dict[str, str] = Field(default={})
    srun_additional_args: str = "--unbuffered --mpi=pmi2 -K --chdir $PWD"
    additional_bash_cmds: tuple[str, ...] | None = None
    container_type: Literal["apptainer", "none"] = "apptainer"
    mount: str | None = "/storage:/storage"
    nodelist: str | None = None
    exclude: str | None = None
    ray_placement_strategy: Literal["shared", "separate", "deferred"] = "shared"

    foreign: ClassVar[dict[str, Foreign]] = {
        "cmd": Foreign(ANYTHING, why="is ignored: the processes of a run are started by its node daemons")
    }
