"""`report`: one self-contained HTML page about a run, or its numbers as JSON."""

import argparse
import json
from pathlib import Path

from core.config.errors import UserError
from core.telemetry.files import write_atomic
from launcher.find_run import find_run
from launcher.reporting.page import page
from launcher.reporting.summary import summarise


class ReportError(UserError):
    """The page cannot be written."""


def run(arguments: argparse.Namespace) -> int:
    run_dir = find_run(arguments.run)
    summary = summarise(run_dir)
    if arguments.json:
        print(json.dumps(summary, indent=1))
        if arguments.out is None:
            return 0
    out: Path = arguments.out or run_dir.root / "report.html"
    try:
        write_atomic(out, page(run_dir, summary))
    except OSError as error:
        raise ReportError(
            f"{out} cannot be written: {error.strerror or error}; choose another place by --out"
        ) from error
    if not arguments.json:
        print(out)
    return 0
