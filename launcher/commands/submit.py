"""submit: as run, but detached: returns as soon as the daemons are started."""

from __future__ import annotations

import argparse
import json

from launcher.commands.run import begin_from, sent_text
from launcher.launch import Launch
from launcher.schedulers.local import LocalScheduler
from launcher.schedulers.slurm import SlurmScheduler


def run(arguments: argparse.Namespace) -> int:
    launch = begin_from(arguments, on_cluster=True)
    return 2 if launch is None else detached(launch, as_json=arguments.json)


def place(launch: Launch) -> tuple[list[str], str]:
    """Jobs of Slurm, if any, and what happened, in words."""
    if launch.plan.shape:
        sent = SlurmScheduler().send(launch)
        return sent.job_ids, f"submitted: {launch.run_dir.root}\n{sent_text(launch.run_dir, sent)}"
    LocalScheduler().place(launch, attached=False)
    return [], f"started: {launch.run_dir.root}"


def detached(launch: Launch, *, as_json: bool = False) -> int:
    root = launch.run_dir.root
    job_ids, said = place(launch)
    if as_json:
        print(json.dumps({"run_dir": str(root), "attempt": launch.attempt, "jobs": job_ids}))
    else:
        print(said)
        for command in ("status", "logs -f", "cancel"):
            print(f"  python -m launcher {command} {root}")
    return 0
