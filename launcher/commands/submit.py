"""submit: as run, but detached: returns as soon as the daemons are started."""

from __future__ import annotations

import argparse
import json

from launcher.commands.run import begin_from
from launcher.launch import Launch
from launcher.schedulers.local import LocalScheduler


def run(arguments: argparse.Namespace) -> int:
    launch = begin_from(arguments)
    return 2 if launch is None else detached(launch, as_json=arguments.json)


def detached(launch: Launch, *, as_json: bool = False) -> int:
    LocalScheduler().place(launch, attached=False)
    root = launch.run_dir.root
    if as_json:
        print(json.dumps({"run_dir": str(root), "attempt": launch.attempt}))
    else:
        print(f"started: {root}")
        for command in ("status", "logs -f", "cancel"):
            print(f"  python -m launcher {command} {root}")
    return 0
