"""run: plans, writes the run directory, starts every process on this machine, and stays until the run has ended."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time

from core.config import load
from launcher.attached import Attendance, ending_text
from launcher.commands.plan import places
from launcher.launch import Launch, begin
from launcher.live import LiveView
from launcher.liveness import look
from launcher.node.state import Phase, State
from launcher.plan import PlanError, settle
from launcher.planning.printing import problems_text
from launcher.run_dir import RunDir, RunDirError
from launcher.schedulers.local import LocalScheduler
from launcher.schedulers.slurm import Sent, SlurmScheduler
from launcher.slurm.queue import WATCH

FOLLOW_SECS = 2.0
EXIT_STATUS = {Phase.DONE: 0, Phase.CANCELLED: 130}


def run(arguments: argparse.Namespace) -> int:
    launch = begin_from(arguments, on_cluster=False)
    return 2 if launch is None else attached(launch, as_json=arguments.json)


def begin_from(arguments: argparse.Namespace, *, on_cluster: bool) -> Launch | None:
    """A new run of CONFIG; None after saying why it cannot run."""
    config = load(arguments.config, arguments.overrides)
    try:
        config, planned = settle(config, emulated=arguments.emulate, on_cluster=on_cluster)
        for line in planned.swaps:
            print(f"swap: {line}", file=sys.stderr)
        for line in planned.warnings:
            print(f"warning: {line}", file=sys.stderr)
        return begin(config, planned)
    except PlanError as error:
        print(problems_text(error, places(arguments.config, arguments.overrides)), file=sys.stderr)
        return None


def follow_job(launch: Launch, *, as_json: bool = False) -> int:
    """A Slurm job outlives this view: Ctrl-C leaves it alone, only `cancel` ends it."""
    run_dir = launch.run_dir
    print(sent_text(run_dir, SlurmScheduler().send(launch)), file=sys.stderr)
    try:
        state = wait_for(run_dir, quiet=as_json)
    except KeyboardInterrupt:
        print(f"\ndetached; the job goes on: python -m launcher cancel {run_dir.root} ends it", file=sys.stderr)
        return 0
    if as_json:
        print(json.dumps({"run_dir": str(run_dir.root), **dataclasses.asdict(state)}, indent=1))
    print(ending_text(run_dir, state), file=sys.stderr if as_json or state.phase is not Phase.DONE else sys.stdout)
    return EXIT_STATUS.get(state.phase, 1)


def wait_for(run_dir: RunDir, *, quiet: bool) -> State:
    """Until Slurm has no job of the run any more."""
    view = LiveView(run_dir)
    view.skip_old()
    WATCH.poll_secs = load(run_dir.config, []).slurm.poll_secs
    while True:
        found = look(run_dir)
        if found.state is None:
            raise RunDirError(f"{run_dir.root} is gone; its job may run on: scancel it by its id")
        for line in [] if quiet else view.new_lines():
            print(line, flush=True)
        if not found.alive:
            return found.state
        time.sleep(FOLLOW_SECS)


def sent_text(run_dir: RunDir, sent: Sent) -> str:
    ids = ", ".join(sent.job_ids)
    return f"Slurm job {ids}: {sent.shape}, {sent.why}; script {run_dir.submitit / 'job.sbatch'}"


def attached(launch: Launch, *, as_json: bool = False) -> int:
    """Exit status 0 only when the run is done."""
    print(f"run directory {launch.run_dir.root} (attempt {launch.attempt})", file=sys.stderr)
    if launch.plan.shape:
        return follow_job(launch, as_json=as_json)
    state = Attendance(launch, LocalScheduler().place(launch, attached=True)).attend(quiet=as_json)
    if as_json:
        print(json.dumps({"run_dir": str(launch.run_dir.root), **dataclasses.asdict(state)}, indent=1))
    text = ending_text(launch.run_dir, state)
    print(text, file=sys.stderr if as_json or state.phase is not Phase.DONE else sys.stdout)
    return EXIT_STATUS.get(state.phase, 1)
