"""Section `slurm`: what a run asks of a Slurm cluster, for the whole job and for each partition of the run.

Every key of Ask may also stand under `slurm.inference` or `slurm.training`, which then win for that side. Any other
sbatch option goes under `options` by its own name (`options: {switches: 1, "no-kill": true}`).
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from core.config.base import Section

Count = Annotated[int, Field(ge=1)]
Words = tuple[str, ...]
TIME = r"^(INFINITE|UNLIMITED|\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+|\d+-\d+:\d\d|\d+-\d+:\d\d:\d\d)$"
SIZE = r"^0*[1-9]\d*[KMGT]?$"
SIZE_OR_ALL = r"^\d+[KMGT]?$"
Word = Annotated[str, Field(pattern=r"^\S*$")]
WANTED = {
    "time": "minutes as 90, 24:00:00 or 1-00:00:00",
    "mem_per_gpu": "a size as 64G",
    "mem_per_node": "a size as 64G, or 0 for all of the node",
}
WANTED |= dict.fromkeys(
    ("partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "gpu_type", "licenses",
     "mail_type", "mail_user"), "one word, without spaces",
)  # fmt: skip
"""What a person reads of a key whose value does not match."""
OWN = frozenset((
    "nodes", "ntasks", "ntasks-per-node", "tasks-per-node", "output", "error", "open-mode", "job-name",
    "signal", "dependency", "array", "hold", "wrap", "parsable", "test-only", "chdir", "requeue",
    "no-requeue", "het-group",
))  # fmt: skip
"""Options that this launcher writes itself: one of them given again would break the job."""


class Ask(Section):
    """What can be asked for a partition. null or empty: nothing is said, the site's default holds."""

    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    time: Annotated[str, Field(pattern=TIME)] | None = None
    constraint: Word | None = None
    reservation: Word | None = None
    nodelist: Word | None = None
    exclude: Word | None = None
    gpu_type: Word | None = None
    gpu_form: Literal["gres", "gpus-per-node", "none"] | None = None  # how GPUs are asked for [gres]
    cpus_per_gpu: Count | None = None
    cpus_per_node: Count | None = None
    mem_per_gpu: Annotated[str, Field(pattern=SIZE)] | None = None
    mem_per_node: Annotated[str, Field(pattern=SIZE_OR_ALL)] | None = None  # 0: all of the node
    exclusive: bool | None = None
    licenses: Word | None = None
    mail_type: Word | None = None
    mail_user: Word | None = None
    comment: str | None = None
    modules: Words | None = None  # `module load` of each, in order
    setup: Words | None = None  # shell lines before the first process
    env: dict[str, str] = Field(default={})
    container: Literal["pyxis", "apptainer", "singularity"] | None = None
    container_image: str | None = None
    container_mounts: Words | None = None  # SRC:DST[:FLAGS]
    srun_args: Words | None = None
    options: dict[str, Any] = Field(default={})

    @field_validator("options")
    @classmethod
    def _not_ours(cls, value: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(name for name in (key.replace("_", "-").lstrip("-") for key in value) if name in OWN)
        if taken:
            raise ValueError(f"{', '.join(taken)}: written by the launcher itself, cannot be given here")
        keys = {key.replace("-", "_").lstrip("_") for key in value}
        named = sorted(keys & Ask.model_fields.keys())
        if named:
            raise ValueError(f"{', '.join(named)}: has a key of its own in this section")
        return value


class Slurm(Ask):
    """Ours: the whole job, and what differs for one side."""

    shape: Literal["auto", "hetjob", "one_job"] = "auto"
    interface: str | None = None  # network interface of the run's own traffic [the route to training node 0]
    requeue: bool = True
    signal_lead_secs: Annotated[int, Field(ge=10)] = 120  # USR2 comes that long before the time limit
    chain: Annotated[int, Field(ge=1)] = 1  # jobs one after the other (dependency singleton)
    snapshot_code: bool = False
    python: str | None = None  # on the nodes [this interpreter]
    poll_secs: Annotated[float, Field(ge=1)] = 10.0
    inference: Ask | None = None
    training: Ask | None = None

    def of(self, partition: str) -> Ask:
        """What is asked for one partition: its own keys win, env and options are laid over each other."""
        own = self.inference if partition == "inference" else self.training
        common = {name: getattr(self, name) for name in Ask.model_fields}
        if own is None:
            return Ask(**common)
        for name in Ask.model_fields:
            value = getattr(own, name)
            if name in ("env", "options"):
                common[name] = {**common[name], **value}
            elif value is not None:
                common[name] = value
        return Ask(**common)
