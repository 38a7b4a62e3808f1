"""plan: prints what would run where, or everything that is wrong; starts nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from core.config import Config, load
from core.config.overrides import apply_override
from core.config.reading import read_document, read_text
from launcher.emulate import emulate
from launcher.plan import PlanError, Problem, plan
from launcher.planning.printing import plan_text, problems_text
from launcher.run_dir import run_dir_of
from launcher.slurm.script import script_of


def run(arguments: argparse.Namespace) -> int:
    try:
        config = load(arguments.config, arguments.overrides)
        if arguments.sbatch:
            return print_script(config, emulated=arguments.emulate)
        swaps: list[str] = []
        if arguments.emulate:
            config, swaps = emulate(config, on_cluster=True)
        planned = plan(config, emulate=arguments.emulate, swaps=swaps)
    except PlanError as error:
        text = problems_text(error, places(arguments.config, arguments.overrides))
        if arguments.json:
            print(json.dumps({"problems": [str(each) for each in error.problems], "fits": error.fits}, indent=1))
        print(text, file=sys.stderr)
        return 2
    print(planned.to_json() if arguments.json else plan_text(planned))
    return 0


def print_script(config: Config, *, emulated: bool) -> int:
    """Byte for byte what submit sends."""
    if config.scheduler.type != "slurm":
        text = "--sbatch prints the script of a Slurm job: set scheduler.type=slurm"
        raise PlanError([Problem("scheduler.type", text)])
    swaps: list[str] = []
    if emulated:
        config, swaps = emulate(config, on_cluster=True)
    planned = plan(config, emulate=emulated, swaps=swaps)
    run_dir = run_dir_of(config.cluster.fileroot, config.experiment_name, config.trial_name)
    print(script_of(config, planned, run_dir)[1], end="")
    for line in (*planned.warnings, *planned.not_built):
        print(f"warning: {line}", file=sys.stderr)
    return 0


def places(path: Path, overrides: Sequence[str]) -> Callable[[str], str]:
    """From a dotted key to the file:line, or the override, that wrote it."""
    document = read_document(read_text(path), str(path), Config)
    for override in overrides:
        apply_override(document, override, Config)
    return lambda key: document.where(tuple(key.split(".")))
