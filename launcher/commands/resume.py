"""resume: the next attempt of a run that is not alive, from its last checkpoint, attached."""

from __future__ import annotations

import argparse
import sys

from launcher.commands.run import attached
from launcher.commands.submit import detached
from launcher.find_run import find_run
from launcher.launch import begin_again
from launcher.plan import PlanError
from launcher.planning.printing import problems_text


def run(arguments: argparse.Namespace) -> int:
    run_dir = find_run(arguments.run)
    try:
        launch = begin_again(run_dir, arguments.overrides)
    except PlanError as error:
        print(problems_text(error, lambda key: str(run_dir.config)), file=sys.stderr)
        return 2
    if arguments.detach:
        return detached(launch, as_json=arguments.json)
    return attached(launch, as_json=arguments.json)
