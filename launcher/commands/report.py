"""`report`: one self-contained HTML page about a run, or its numbers as JSON."""

import argparse
import json
from pathlib import Path
from typing import Any

from core.config.errors import UserError
from core.telemetry.files import write_atomic
from launcher.find_run import find_run
from launcher.reporting.page import page
from launcher.reporting.summary import summarise


class ReportError(UserError):
    """The page cannot be written."""


def compact(summary: dict[str, Any]) -> str:
    """One line for each key, so that curves do not fill the screen."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in summary.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def run(arguments: argparse.Namespace) -> int:
    run_dir = find_run(arguments.run)
    summary = summarise(run_dir)
    if arguments.json:
        print(compact(summary))
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
