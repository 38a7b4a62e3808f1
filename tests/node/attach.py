"""`python -m tests.node.attach RUN_DIR [submit]`: what `launcher run` (or submit) does once a run is planned, with the
stand-ins of tests/node/roles as its processes."""

from __future__ import annotations

import sys
from pathlib import Path

from launcher.commands.run import attached
from launcher.commands.submit import detached
from launcher.launch import Launch
from launcher.node.state import read_state
from launcher.plan import Plan
from launcher.run_dir import RunDir

ROLES = "tests.node.roles"


def launch_of(run_dir: RunDir) -> Launch:
    state = read_state(run_dir)
    assert state is not None
    plan = Plan.from_json(run_dir.plan.read_text())
    return Launch(run_dir, plan, state.attempt, roles=ROLES, grace=2.0)


if __name__ == "__main__":
    launch = launch_of(RunDir(Path(sys.argv[1])))
    sys.exit(detached(launch) if "submit" in sys.argv else attached(launch))
