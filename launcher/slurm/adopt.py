"""A job that somebody submitted by hand (the templates in slurm/): the run directory it works in.

`python -P -m launcher.slurm.adopt [--emulate] CONFIG key=value…` prints it; a requeued job finds its own. What the
launcher's `submit` does on the login node happens here, on the job's first node.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from core.config import UserError, load
from launcher.launch import begin, begin_again
from launcher.node.state import read_state
from launcher.plan import PlanError, settle
from launcher.planning.layout import Plan
from launcher.run_dir import RunDir, run_dir_of
from launcher.slurm.queue import jobs_of, write_jobs


class AllocationMismatchError(UserError):
    """The job's nodes are not those that the configuration wants."""


def adopt(config_path: Path, overrides: list[str], *, emulated: bool) -> RunDir:
    config = load(config_path, ["scheduler.type=slurm", *overrides])
    run_dir = run_dir_of(config.cluster.fileroot, config.experiment_name, config.trial_name)
    job = os.environ.get("SLURM_JOB_ID", "")
    state = read_state(run_dir)
    if state is None:
        config, planned = settle(config, emulated=emulated, on_cluster=True)
        check_nodes(planned)
        launch = begin(config, planned)
    elif job and job in jobs_of(run_dir):
        return run_dir  # requeued: launcher.slurm.batch counts the attempt
    else:
        launch = begin_again(run_dir, overrides)
        check_nodes(launch.plan)
    run_dir.submitit.mkdir(exist_ok=True, mode=0o700)
    write_jobs(launch.run_dir, [job])
    return launch.run_dir


def check_nodes(plan: Plan) -> None:
    for partition in plan.partitions:
        name = f"VLM_RL_{partition.name.upper()}_NODES"
        given = [each for each in os.environ.get(name, "").split(",") if each]
        if len(given) != len(partition.nodes):
            layout = " (--emulate has at most two GPUs a side)" if plan.emulate else ""
            raise AllocationMismatchError(
                f"the {partition.name} partition wants {len(partition.nodes)} node(s){layout}, the job gives it "
                f"{len(given)} ({', '.join(given) or 'none'}): change --nodes of its component in the template, or "
                "allocation_mode"
            )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="launcher.slurm.adopt")
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--emulate", action="store_true")
    arguments = parser.parse_intermixed_args(argv)
    try:
        print(adopt(arguments.config, arguments.overrides, emulated=arguments.emulate).root)
    except (UserError, PlanError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
