"""`make chaos`: every cell, one after the other, and the table for docs/reliability.md."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.chaos.cells import CELLS, CI


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        report = Path(scratch) / "cells.xml"
        words = [
            sys.executable,
            "-m",
            "pytest",
            "tests/chaos",
            "-m",
            "slow or not slow",
            "-vv",
            f"--junit-xml={report}",
            *sys.argv[1:],
        ]
        status = subprocess.run(words, check=False).returncode
        print(table(report))
    return status


def table(report: Path) -> str:
    """One line a cell: process, phase, what was done, seconds, and whether the run ended as if nothing had happened."""
    cells = {cell.name: cell for cell in [*CELLS, *CI]}
    rows = ["| process | phase | what | mode | seconds | |", "| --- | --- | --- | --- | --- | --- |"]
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "").partition("[")[2].rstrip("]")
        if name not in cells:
            continue
        cell = cells[name]
        mode = "bit for bit" if cell.deterministic else "audit"
        ended = "FAILED" if case.find("failure") is not None or case.find("error") is not None else "survived"
        seconds = float(case.get("time", 0))
        rows.append(f"| {cell.process} | {cell.phase} | {cell.action} | {mode} | {seconds:.0f} | {ended} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
