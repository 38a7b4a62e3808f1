"""why: who waits on whom in a run, alive or dead; with --stacks, where every thread of it stands."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from core.rpc.client import Client
from core.rpc.errors import RpcError
from core.telemetry.metrics import read_metrics
from launcher.commands.status import error_of, verdict
from launcher.find_run import find_run
from launcher.liveness import Liveness, look
from launcher.run_dir import RunDir
from launcher.waiting import chain, last_signs

STACK_SECS = 1.5
LAST_BYTES = 20_000
LAST_FILES = {
    "last batch logged": "rollouts/batches/[0-9]*",
    "last version published": "weights/v[0-9]*",
    "last checkpoint": "checkpoints/step-*",
}


def run(arguments: argparse.Namespace) -> int:
    run_dir = find_run(arguments.run)
    found = look(run_dir)
    answer = found.answer or {}
    told: dict[str, Any] = {
        "run_dir": str(run_dir.root),
        "verdict": verdict(found),
        "chain": chain(answer["services"], answer["children"]) + parts(answer) if answer else [],
        "last_signs": last_signs(answer.get("children", {})),
        "files": file_signs(run_dir, time.time()),
        "error": _error(run_dir, found),
        "stacks": stacks(run_dir, found) if arguments.stacks else {},
    }
    print(json.dumps(told, indent=1) if arguments.json else text(told))
    return 0


def parts(answer: dict[str, Any]) -> list[str]:
    """What is missing of servers over several nodes."""
    return [
        f"← {part['server']}: part {part['part']} on {part['node']} is {part['state']}"
        + (f" ({part['why']})" if part["why"] else "")
        for part in answer.get("parts", [])
        if part["state"] != "up"
    ]


def text(told: dict[str, Any]) -> str:
    lines = [f"{told['run_dir']}: {told['verdict']}", *(f"  {line}" for line in told["chain"])]
    if told["last_signs"]:
        lines += ["  last signs:", *(f"    {line}" for line in told["last_signs"])]
    lines += [f"  {line}" for line in told["files"]]
    if told["error"]:
        lines.append(f"  it stopped on: {told['error']}")
    for name, stack in told["stacks"].items():
        lines += [f"── {name}", stack]
    return "\n".join(lines)


def file_signs(run_dir: RunDir, now: float) -> list[str]:
    """What the run directory shows of its last progress, whether or not anything lives."""
    lines = []
    records = read_metrics(run_dir.metrics)
    steps = records.steps or records.sft
    if steps:
        lines.append(f"last step recorded: {steps[-1]['step']}, {_ago(now - steps[-1].get('time', now))}")
    for name, place in LAST_FILES.items():
        newest = max(run_dir.root.glob(place), key=lambda path: path.stat().st_mtime, default=None)
        if newest is not None:
            lines.append(f"{name}: {newest.name}, {_ago(now - newest.stat().st_mtime)}")
    return lines


def stacks(run_dir: RunDir, found: Liveness) -> dict[str, str]:
    """Of a living run: what every process of every node writes when asked. Of a dead one: the end of each log."""
    if found.rendezvous is None or found.answer is None:
        attempt = found.state.attempt if found.state else 0
        return {_process(path): _end(path, 0) for path in sorted((run_dir.logs / str(attempt)).glob("*/*.log"))}
    token = run_dir.read_token()
    lead = Client(found.rendezvous.daemon, token)
    urls = [row["url"] for row in lead.get("/registry")["daemons"]]
    marks: dict[str, tuple[Path, int]] = {}
    for path in (run_dir.logs / str(found.answer["attempt"])).glob("*/*.log"):
        marks[_process(path)] = path, path.stat().st_size
    for url in urls:
        try:
            Client(url, token).post("/stacks", {})
        except RpcError as error:
            marks[url] = Path("/dev/null"), 0
            print(f"{url}: {error}")
    time.sleep(STACK_SECS)
    return {name: _end(path, size) or "wrote nothing: it is stopped, or gone" for name, (path, size) in marks.items()}


def _process(log: Path) -> str:
    """The name of a log's process; a daemon has its node's."""
    return f"daemon of {log.parent.name}" if log.stem == "daemon" else log.stem


def _end(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset or max(0, path.stat().st_size - LAST_BYTES))
            return file.read().decode("utf-8", "replace").rstrip()
    except OSError as error:
        return str(error)


def _error(run_dir: RunDir, found: Liveness) -> str | None:
    error = error_of(run_dir, found)
    return f"{error.process}: {error.message}" if error else None


def _ago(secs: float) -> str:
    return f"{max(0.0, secs):.0f} s ago"
