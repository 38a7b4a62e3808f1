"""`make chaos`: every cell, one after the other, and the table of how each ended.

With `--write` the rows of the cells that ran go into docs/reliability.md; everything else is handed to pytest
(`-k "rollout and stop"`). A failure is shown as it comes, and its run directory stays.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from tests.chaos.cells import CELLS, CI

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
HEAD = ["| process | phase | what | mode | seconds | |", "| --- | --- | --- | --- | --- | --- |"]
EVERY = {cell.name: cell for cell in [*CI, *CELLS]}


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "--write"]
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        report = Path(scratch) / "cells.xml"
        command = [sys.executable, "-m", "pytest", "tests/chaos", "-m", "slow or not slow", "-vv"]
        status = subprocess.run([*command, f"--junit-xml={report}", *words], check=False).returncode
        found = rows(report)
    print("\n".join([*HEAD, *found.values()]))
    seconds = sum(float(row.split("|")[5]) for row in found.values())
    print(f"{len(found)} cells, {seconds / 60:.0f} minutes")
    if "--write" in sys.argv:
        PAGE.write_text(with_rows(PAGE.read_text(), found))
    return status


def rows(report: Path) -> dict[str, str]:
    """By cell: what was done, seconds, and whether the run ended as if nothing had happened."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "").partition("[")[2].rstrip("]")
        if name in EVERY:
            failed = case.find("failure") is not None or case.find("error") is not None
            ended = "FAILED" if failed else "survived"
            found[name] = f"{head_of(name)} {float(case.get('time', 0)):.0f} | {ended} |"
    return found


def head_of(name: str) -> str:
    cell = EVERY[name]
    mode = "bit for bit" if cell.deterministic else "audit"
    which = cell.process if cell.ranks == 1 else f"{cell.process} of {cell.ranks}"
    return f"| {which} | {cell.phase}, {cell.number}. time | {cell.action} | {mode} |"


def with_rows(page: str, found: dict[str, str]) -> str:
    """The page with these rows in its table, in the order of the cells; rows of cells that are no more go."""
    before, _, rest = page.partition(HEAD[0])
    old, _, after = rest.partition("\n\n")
    kept = {name: row for name in EVERY for row in old.splitlines() if row.startswith(head_of(name))}
    kept |= found
    table = [*HEAD, *(kept[name] for name in EVERY if name in kept)]
    return before + "\n".join(table) + ("\n\n" + after if after else "\n")


if __name__ == "__main__":
    sys.exit(main())
