"""plan: prints what would run where, or everything that is wrong; starts nothing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from core.config import Config, load
from core.config.overrides import apply_override
from core.config.reading import read_document
from launcher.emulate import emulate
from launcher.plan import PlanError, plan
from launcher.planning.printing import plan_text, problems_text


def run(arguments: argparse.Namespace) -> int:
    try:
        config = load(arguments.config, arguments.overrides)
        swaps: list[str] = []
        if arguments.emulate:
            config, swaps = emulate(config)
        planned = plan(config, emulate=arguments.emulate, swaps=swaps)
    except PlanError as error:
        text = problems_text(error, places(arguments.config, arguments.overrides))
        if arguments.json:
            print(json.dumps({"problems": [str(each) for each in error.problems], "fits": error.fits}, indent=1))
        print(text, file=sys.stderr)
        return 2
    print(planned.to_json() if arguments.json else plan_text(planned))
    return 0


def places(path: Path, overrides: Sequence[str]) -> Callable[[str], str]:
    """From a dotted key to the file:line, or the override, that wrote it."""
    document = read_document(path.read_text(encoding="utf-8"), str(path), Config)
    for override in overrides:
        apply_override(document, override, Config)
    return lambda key: document.where(tuple(key.split(".")))
