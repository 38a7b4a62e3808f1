"""verify-parallel: a certificate, on one's own model and rows, that layouts compute what one process computes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from core.config import Config, load
from core.config.errors import UserError
from launcher.allocation import AllocationError, Component, parse
from launcher.emulate import emulate
from launcher.model_sizes import shape_of
from launcher.node.specs import REPOSITORY
from launcher.planning.change import with_value
from launcher.planning.devices import visible_gpus
from launcher.planning.divisibility import cutting_problems
from launcher.planning.known import cache_of

DEFAULT = ("d2", "t2", "c2", "d4", "d2t2", "d2c2", "c2t2")


class LayoutError(UserError):
    """A layout that cannot be verified; the message says why."""


def run(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, arguments.overrides)
    gpus = 0 if arguments.emulate else len(visible_gpus())
    if arguments.emulate:
        config, swaps = emulate(config)
        for line in swaps:
            print(f"emulate     {line}", file=sys.stderr)
    wanted = arguments.layouts or [each for each in DEFAULT if not gpus or _ranks(each) <= gpus]
    ranks = {each: _ranks(each) for each in wanted}  # refuses what is no layout of a trainer
    too_many = [each for each in wanted if gpus and ranks[each] > gpus]
    if too_many or not wanted:
        raise LayoutError(
            f"--layouts {' '.join(too_many) or '(none)'}: this machine has {gpus} GPUs; "
            "choose smaller ones, or add --emulate to verify them on CPU ranks"
        )
    _refuse_uneven(config, wanted)
    with tempfile.TemporaryDirectory(prefix="verify-parallel-") as folder:
        resolved = Path(folder) / "config.yaml"
        resolved.write_text(config.dump_yaml())
        words = [sys.executable, "-P", "-m", "launcher.roles.verify_parallel", str(resolved), "--layouts", *wanted]
        words += ["--rows", str(arguments.rows), "--tolerance", str(arguments.tolerance)]
        words += ["--device", "cuda" if gpus else "cpu", *(["--json"] if arguments.json else [])]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
        if not gpus:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        return subprocess.run(words, env=environment, check=False).returncode


def _ranks(layout: str) -> int:
    dims = component(layout).dims
    return dims.d * dims.t * dims.c


def _refuse_uneven(config: Config, layouts: list[str]) -> None:
    """By plan's own rules; every c is computed both ways, of which ulysses is the one that must divide."""
    shape = shape_of(config.actor.path, cache_of(config))
    plain = with_value(with_value(config, "actor.archon.cp_style", "ulysses"), "actor.archon.dp_replicate", 1)
    for layout in layouts:
        # without plan's cure (another cp_style), which changes nothing here
        found = [each.message.partition("; or ")[0] for each in cutting_problems(plain, parse(layout), shape)]
        if found:
            raise LayoutError(f"--layouts {layout}: {'; '.join(found)}")


def component(layout: str) -> Component:
    """The trainer's dims of one word of --layouts."""
    try:
        (found,) = parse(layout).components
    except (AllocationError, ValueError) as error:
        raise LayoutError(f"--layouts {layout}: {error}") from error
    if found.is_inference or found.dims.p > 1 or found.dims.e > 1:
        raise LayoutError(f"--layouts {layout}: a layout is d, t and c of the trainer, e.g. d2t2")
    return found
