"""allocation + cluster + model → what a run consists of, or why it cannot run.

Owns the order in which a configuration is judged. The types are in launcher.planning.layout, the judging in its
siblings, the grammar of allocation_mode in launcher.allocation. It starts nothing and imports no torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from core.config import Config, not_built
from launcher.emulate import FOLLOW_MODEL, emulate
from launcher.model_sizes import ModelError, ModelShape, local_directory
from launcher.planning.change import get_value, with_value
from launcher.planning.dataset import dataset_findings
from launcher.planning.judge import judge
from launcher.planning.known import cache_of, read_known
from launcher.planning.layout import BatchPlan, Memory, Node, Partition, Plan, Rank, Server
from launcher.planning.limits import exposure_warnings, limit_warnings
from launcher.planning.memory import disk_bytes
from launcher.planning.placement import spread_warnings
from launcher.planning.problem import PlanError, Problem
from launcher.planning.reward import reward_findings
from launcher.planning.suggestions import fits
from launcher.slurm.ask import slurm_warnings

__all__ = [
    "BatchPlan",
    "Memory",
    "Node",
    "Partition",
    "Plan",
    "PlanError",
    "Problem",
    "Rank",
    "Server",
    "plan",
    "run_id",
    "settle",
]


def plan(
    config: Config,
    *,
    emulate: bool = False,
    device: str | None = None,
    model: ModelShape | None = None,
    swaps: list[str] | None = None,
    user_code: Path | None = None,
) -> Plan:
    """Plans a run; raises PlanError with everything that is wrong and layouts that fit.

    `emulate` marks a configuration that launcher.emulate has already swapped (`swaps`: its lines); `model` stands in
    for the sizes that are else read from actor.path; `user_code` is where a reward is looked for [where he works].
    """
    device = device or ("cpu" if emulate else "cuda")
    try:
        known, problems = read_known(config, model)
    except ModelError as error:
        raise PlanError([Problem("actor.path", str(error))]) from error
    judged = judge(config, known, device)
    problems += judged.problems
    doubts: list[str] = []
    # servers alone, as `serve` starts them, read no rows and grade nothing
    if judged.allocation is None or any(not each.is_inference for each in judged.allocation.components):
        for found, uncertain in (dataset_findings(config), reward_findings(config, user_code or Path.cwd())):
            problems += found
            doubts += uncertain
    if problems:
        raise PlanError(problems, fits(config, known, device, problems))
    return Plan(
        run_id=run_id(config),
        device=device,
        emulate=emulate,
        swaps=list(swaps or ()),
        warnings=[
            *doubts,
            *limit_warnings(config, known, emulate=emulate),
            *(spread_warnings(judged.allocation, config.cluster.n_gpus_per_node) if device == "cuda" else ()),
            *exposure_warnings(config, judged.allocation),
            *slurm_warnings(config, judged.shape.kind),
        ],
        partitions=judged.partitions,
        batch=judged.batch,
        memory=judged.memory,
        disk_bytes=disk_bytes(config, known, judged.batch.samples),
        not_built=not_built(config),
        notes=judged.notes,
        model={"name": known.shape.name, "params": known.shape.params, "source": known.shape.source},
        shape=judged.shape.kind,
        shape_why=judged.shape.why,
    )


def settle(
    config: Config, *, emulated: bool, on_cluster: bool = False, user_code: Path | None = None
) -> tuple[Config, Plan]:
    """What a run directory holds: the configuration (swapped under --emulate, hub ids as local paths) and its plan.

    `on_cluster`: an emulated run stays on the scheduler of its configuration, else it comes to this machine.
    Raises PlanError for what cannot run, for what is not built yet, and for a model that is not on this machine.
    """
    swaps: list[str] = []
    if emulated:
        config, swaps = emulate(config, on_cluster=on_cluster)
    planned = plan(config, emulate=emulated, swaps=swaps, user_code=user_code)
    if planned.not_built:
        parts = [line.partition(": ") for line in planned.not_built]
        raise PlanError([Problem(key, text) for key, _, text in parts])
    return with_local_paths(config), planned


def with_local_paths(config: Config) -> Config:
    """Every model path as a directory of this machine, so that no process has to look a hub id up."""
    for key in ("actor.path", *FOLLOW_MODEL):
        path = get_value(config, key)
        if not path:
            continue
        directory = local_directory(path, cache_of(config))
        if directory is None:
            text = f"{path!r} is not on this machine: run `python -m launcher prepare CONFIG` where there is internet"
            raise PlanError([Problem(key, text)])
        config = with_value(config, key, str(directory.absolute()))
    return config


def run_id(config: Config) -> str:
    return re.sub(r"[^a-z0-9.-]+", "-", f"{config.experiment_name}-{config.trial_name}".lower()).strip("-.")
