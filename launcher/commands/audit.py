"""audit: proves from a run's files that every prompt was trained once, or names what is wrong; exit 1 then."""

from __future__ import annotations

import argparse
import dataclasses
import json

from launcher.auditing import audit
from launcher.find_run import find_run


def run(arguments: argparse.Namespace) -> int:
    run_dir = find_run(arguments.run)
    found = audit(run_dir)
    if arguments.json:
        print(json.dumps({"run_dir": str(run_dir.root), **dataclasses.asdict(found)}, indent=1))
        return 1 if found.problems else 0
    print(
        f"{run_dir.root}: {found.batches} batches of {found.groups} groups, {found.void} void, "
        f"{found.starts} starts of the rollout service, staleness at most {found.staleness_max}"
    )
    for problem in found.problems:
        print(f"  {problem}")
    print("  " + (f"{len(found.problems)} problems" if found.problems else "every prompt was trained once, in order"))
    return 1 if found.problems else 0
