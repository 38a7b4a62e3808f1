"""The GPUs of this machine, counted without CUDA: whether a plan can run here."""

from __future__ import annotations

import os
import re
from pathlib import Path

from launcher.planning.layout import Plan
from launcher.planning.problem import PlanError, Problem

_DEVICE = re.compile(r"nvidia[0-9]+")


def visible_gpus() -> list[str]:
    """Names for CUDA_VISIBLE_DEVICES, in order: those it allows already, else the machine's device files."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return [name.strip() for name in allowed.split(",") if name.strip() not in ("", "-1")]
    try:
        count = sum(1 for path in Path("/dev").iterdir() if _DEVICE.fullmatch(path.name))
    except OSError:
        count = 0
    return [str(index) for index in range(count)]


def require_gpus(plan: Plan) -> None:
    """Raises PlanError where a local run is planned on more nodes or GPUs than this machine has."""
    if plan.device == "cpu":
        return
    hosts = {node.host for partition in plan.partitions for node in partition.nodes}
    if len(hosts) > 1:
        message = f"local runs on this machine only, the plan has {len(hosts)} nodes; or add --emulate"
        raise PlanError([Problem("scheduler.type", message)])
    wanted = 1 + max(gpu for partition in plan.partitions for node in partition.nodes for gpu in node.gpus)
    found = len(visible_gpus())
    if found < wanted:
        raise PlanError(
            [
                Problem(
                    "allocation_mode",
                    f"the plan wants {wanted} GPUs of this machine, {found} are visible; "
                    "give it fewer, or run with --emulate (embedded server, tiny checkpoint, no GPU)",
                )
            ]
        )
