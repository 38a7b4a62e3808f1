"""`python -m tests.node.attach RUN_DIR [submit | resume key=value…]`: what the commands do, but with the stand-ins of
tests/node/roles as the processes of the run."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from core.config import UserError, load
from launcher.commands.run import attached
from launcher.commands.submit import detached
from launcher.launch import Launch, begin_again
from launcher.node.state import read_state
from launcher.plan import Plan
from launcher.run_dir import RunDir

ROLES = "tests.node.roles"


def launch_of(run_dir: RunDir) -> Launch:
    state = read_state(run_dir)
    assert state is not None
    plan = Plan.from_json(run_dir.plan.read_text())
    return Launch(run_dir, plan, state.attempt, daemon_secs=load(run_dir.config, []).deadlines.daemon)


def main(root: str, word: str = "run", *overrides: str) -> int:
    run_dir = RunDir(Path(root))
    try:
        launch = begin_again(run_dir, overrides) if word == "resume" else launch_of(run_dir)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    launch = dataclasses.replace(launch, roles=ROLES, grace=2.0)
    return detached(launch) if word == "submit" else attached(launch)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
