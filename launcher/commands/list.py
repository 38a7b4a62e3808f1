"""list: the runs below a directory and how each is; Slurm is asked once for all of them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from launcher.commands.status import verdict
from launcher.damaged import DamagedError
from launcher.find_run import ROOTS
from launcher.liveness import look
from launcher.node.state import read_state
from launcher.run_dir import RunDir, RunDirError
from launcher.slurm.queue import WATCH, jobs_of


def run(arguments: argparse.Namespace) -> int:
    missing = [str(root) for root in arguments.roots if not root.is_dir()]
    if missing:
        raise RunDirError(f"{', '.join(missing)}: no such directory; list takes directories that hold runs")
    rows = [row(run_dir) for run_dir in find_all(arguments.roots or list(ROOTS))]
    if arguments.json:
        print(json.dumps(rows, indent=1))
    elif not rows:
        print("no runs here")
    else:
        width = max(len(each["run"]) for each in rows)
        for each in rows:
            jobs = f"  job {', '.join(each['jobs'])}" if each["jobs"] else ""
            print(f"{each['run']:<{width}}  {each['verdict']:<12} step {each['step']:<6} {each['updated']}{jobs}")
    return 0


def find_all(roots: list[Path]) -> list[RunDir]:
    found = [RunDir(state.parent.absolute()) for root in roots for state in sorted(root.glob("*/*/state.json"))]
    WATCH.ask_for([job for run_dir in found for job in jobs_of(run_dir)])
    return found


def row(run_dir: RunDir) -> dict[str, Any]:
    try:
        state = read_state(run_dir)
    except DamagedError as error:
        print(error, file=sys.stderr)
        return {"run": str(run_dir.root), "verdict": "damaged", "step": 0, "attempt": 0, "updated": "", "jobs": []}
    assert state is not None
    found = look(run_dir) if not state.phase.final else None
    return {
        "run": str(run_dir.root),
        "verdict": str(state.phase) if found is None else verdict(found),
        "step": state.step,
        "attempt": state.attempt,
        "updated": time.strftime("%Y-%m-%d %H:%M", time.localtime(state.updated)),
        "jobs": jobs_of(run_dir),
    }
