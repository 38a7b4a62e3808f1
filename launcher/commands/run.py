"""run: plans, writes the run directory, starts every process on this machine, and stays until the run has ended."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from core.config import load
from launcher.attached import Attendance, ending_text
from launcher.commands.plan import places
from launcher.launch import Launch, begin
from launcher.node.state import Phase
from launcher.plan import PlanError, settle
from launcher.planning.printing import problems_text
from launcher.schedulers.local import LocalScheduler

EXIT_STATUS = {Phase.DONE: 0, Phase.CANCELLED: 130}


def run(arguments: argparse.Namespace) -> int:
    launch = begin_from(arguments)
    return 2 if launch is None else attached(launch, as_json=arguments.json)


def begin_from(arguments: argparse.Namespace) -> Launch | None:
    """A new run of CONFIG; None after saying why it cannot run."""
    config = load(arguments.config, arguments.overrides)
    try:
        config, planned = settle(config, emulated=arguments.emulate)
        for line in planned.swaps:
            print(f"swap: {line}", file=sys.stderr)
        for line in planned.warnings:
            print(f"warning: {line}", file=sys.stderr)
        return begin(config, planned)
    except PlanError as error:
        print(problems_text(error, places(arguments.config, arguments.overrides)), file=sys.stderr)
        return None


def attached(launch: Launch, *, as_json: bool = False) -> int:
    """Exit status 0 only when the run is done."""
    print(f"run directory {launch.run_dir.root} (attempt {launch.attempt})", file=sys.stderr)
    state = Attendance(launch, LocalScheduler().place(launch, attached=True)).attend(quiet=as_json)
    if as_json:
        print(json.dumps({"run_dir": str(launch.run_dir.root), **dataclasses.asdict(state)}, indent=1))
    text = ending_text(launch.run_dir, state)
    print(text, file=sys.stderr if as_json or state.phase is not Phase.DONE else sys.stdout)
    return EXIT_STATUS.get(state.phase, 1)
