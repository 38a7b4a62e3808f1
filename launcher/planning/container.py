"""An image for the servers alone (paths.vllm_container, paths.sglang_container): which, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from core.config import Config
from launcher.allocation import Allocation
from launcher.planning.problem import Problem
from launcher.servers.environment import container_of, is_path
from launcher.slurm.ask import asked


def container_notes(config: Config, allocation: Allocation) -> Iterator[str]:
    for each in allocation.components:
        image = container_of(each.backend, config) if each.is_inference else None
        if image is not None:
            yield f"{each.backend} servers run in {image}, by apptainer or singularity: on PATH of their nodes"


def container_problems(config: Config, allocation: Allocation) -> Iterator[Problem]:
    """It is not there, or the servers are in a container already."""
    for each in allocation.components:
        image = container_of(each.backend, config) if each.is_inference else None
        if image is None:
            continue
        key = f"paths.{each.backend}_container"
        if is_path(image) and not Path(image).exists():
            yield Problem(key, f"{image} is not there; build it (apptainer build), or name a URI as docker://…")
        around = asked(config, "inference").container if config.scheduler.type == "slurm" else None
        if around is not None:
            said = f"{around} (slurm.container, scheduling_spec.image) has the whole inference component in an image"
            yield Problem(key, f"{said}; leave one of the two out")
