"""What each partition asks of Slurm, from the section `slurm` and, below it, from scheduling_spec; and what clashes.

Values to values. launcher.slurm.script writes it down.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from core.config import Config
from core.config.scheduling import SchedulingSpec
from core.config.slurm import Ask
from launcher.planning.problem import Problem

GIB_PER_UNIT = {"K": 1 / 1024**2, "M": 1 / 1024, "G": 1.0, "T": 1024.0}
WHOLE_JOB = (
    "partition", "account", "qos", "time", "constraint", "reservation", "nodelist", "exclude", "exclusive",
    "licenses", "gpu_type", "gpu_form", "comment", "mail_type", "mail_user", "modules", "setup", "container",
    "container_image", "container_mounts", "options",
)  # fmt: skip
"""What the steps of one job have in common."""


def asked(config: Config, partition: str) -> Ask:
    """`slurm` wins; what it leaves open comes from the partition's scheduling_spec; AReaL's defaults say nothing."""
    ask = config.slurm.of(partition)
    section = config.rollout if partition == "inference" else config.actor
    if not section.scheduling_spec:
        return ask
    spec = section.scheduling_spec[0]
    found: dict[str, object] = {}
    if ask.cpus_per_gpu is None and ask.cpus_per_node is None:
        found["cpus_per_gpu"] = spec.cpu
    if ask.mem_per_gpu is None and ask.mem_per_node is None:
        found["mem_per_gpu"] = f"{spec.mem}G"
    for name in ("nodelist", "exclude"):
        if getattr(ask, name) is None and getattr(spec, name):
            found[name] = getattr(spec, name)
    if ask.container_image is None and _written(spec, "image") and spec.container_type != "none":
        found |= {"container_image": spec.image, "container": ask.container or spec.container_type}
        if ask.container_mounts is None and spec.mount:
            found["container_mounts"] = tuple(spec.mount.split(","))
    if ask.srun_args is None and _written(spec, "srun_additional_args"):
        found["srun_args"] = tuple(spec.srun_additional_args.split())
    if ask.setup is None and spec.additional_bash_cmds:
        found["setup"] = spec.additional_bash_cmds
    return ask.model_copy(update=found)


def _written(spec: SchedulingSpec, name: str) -> bool:
    value = getattr(spec, name)
    return bool(value) and value != SchedulingSpec.model_fields[name].default


def gibibytes(size: str) -> float:
    """Slurm counts in megabytes where no unit is written."""
    unit = size[-1] if size[-1] in GIB_PER_UNIT else "M"
    return int(size.rstrip("KMGT")) * GIB_PER_UNIT[unit]


def minutes(time: str) -> float | None:
    """Slurm's own forms: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; None for no limit."""
    if time in ("INFINITE", "UNLIMITED"):
        return None
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, mins, secs = [*parts, 0, 0][:3]
        return int(days) * 1440 + hours * 60 + mins + secs / 60
    if len(parts) == 3:
        return parts[0] * 60 + parts[1] + parts[2] / 60
    return parts[0] + (parts[1] / 60 if len(parts) == 2 else 0)


def slurm_problems(config: Config, kind: str, partitions: list[str], hosts: int) -> list[Problem]:
    """Every contradiction of the section, for `plan` to refuse."""
    return [Problem(key, text) for key, text in _contradictions(config, kind, partitions, hosts)]


def _contradictions(config: Config, kind: str, partitions: list[str], hosts: int) -> Iterator[tuple[str, str]]:
    slurm = config.slurm
    asks = {name: asked(config, name) for name in partitions}
    for name, ask in asks.items():
        where = f"slurm.{name}" if getattr(slurm, name) is not None else "slurm"
        for what in ("cpus", "mem"):
            if getattr(ask, f"{what}_per_gpu") is not None and getattr(ask, f"{what}_per_node") is not None:
                yield f"{where}.{what}_per_node", f"and {what}_per_gpu are both given; keep one"
        if ask.container_image and ask.container is None:
            yield f"{where}.container", "must say who starts container_image: pyxis, apptainer or singularity"
        if ask.container and not ask.container_image:
            yield f"{where}.container_image", f"must be set when container is {ask.container}"
        if ask.gpu_type and ask.gpu_form == "none":
            yield f"{where}.gpu_type", "cannot be asked for when gpu_form is none"
        limit = None if ask.time is None else minutes(ask.time)
        if limit is not None and limit * 60 <= slurm.signal_lead_secs:
            yield (
                "slurm.signal_lead_secs",
                f"{slurm.signal_lead_secs} s before the end of a limit of {ask.time} is before its start",
            )
        both = _overlap(ask.nodelist, ask.exclude)
        if both:
            yield f"{where}.exclude", f"{both} is in nodelist too"
    if kind == "one_job" and len(asks) > 1:
        first, second = asks
        for field in WHOLE_JOB:
            mine, other = getattr(asks[first], field), getattr(asks[second], field)
            if mine != other:
                text = f"{mine!r} for {first} and {other!r} for {second}, but both are steps of one job"
                yield f"slurm.{second}.{field}", f"{text}; make them equal or use slurm.shape=hetjob"
    if kind == "hetjob" and slurm.shape == "hetjob" and hosts > config.cluster.n_nodes:
        yield (
            "slurm.shape",
            f"a hetjob of this allocation takes {hosts} nodes, cluster.n_nodes is {config.cluster.n_nodes}; "
            "components never share a node: use one_job, or more nodes",
        )
    if kind == "hetjob" and len(partitions) == 1:
        yield "slurm.shape", "a hetjob needs two partitions, the allocation has one"
    if (slurm.chain > 1 or slurm.requeue) and slurm.chain > 1 and config.recover.mode in ("disabled", "off"):
        yield "slurm.chain", "needs checkpoints to go on from: set recover.mode=auto"


def _overlap(nodelist: str | None, exclude: str | None) -> str:
    """Names that both lists spell alike (ranges are left to Slurm)."""
    if not nodelist or not exclude:
        return ""
    split = re.compile(r",(?![^\[]*\])")
    return ", ".join(sorted(set(split.split(nodelist)) & set(split.split(exclude))))


def slurm_warnings(config: Config, kind: str) -> list[str]:
    """Nothing where the run is not Slurm's (`kind` is empty)."""
    lines: list[str] = []
    if not kind:
        return lines
    if config.slurm.requeue and config.recover.mode in ("disabled", "off"):
        lines.append("recover.mode: disabled, so a requeued job starts its training over (recover.mode=auto goes on)")
    if kind == "hetjob" and config.slurm.options.get("array"):
        lines.append("slurm.options.array: arrays and hetjobs do not mix")
    return lines
