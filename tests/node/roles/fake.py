"""Processes that stand in for the roles: real processes that register, leave a grandchild, and end as they are told.

What each does is in <run dir>/behaviour.json, by process name: serve | finish | die | die_once | give_up | hang
| exit0.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from core.rpc.service import Service, serve_in_thread
from core.telemetry.phases import announce
from launcher.node.specs import CANNOT_GO_ON
from launcher.roles.arguments import RoleArguments, parse, register


def main(argv: Sequence[str]) -> None:
    arguments = parse(argv)
    behaviour = behaviour_of(arguments)
    # in one write: others append to it, and somebody reads it meanwhile
    with (arguments.run_dir.root / "started.jsonl").open("ab", buffering=0) as file:
        words = {"name": arguments.name, "pid": os.getpid(), "generation": arguments.generation, "cwd": str(Path.cwd())}
        line = json.dumps({**words, "local": str(arguments.local), "env": dict(os.environ)})
        file.write(line.encode() + b"\n")
    if behaviour == "die":
        raise ValueError(f"{arguments.name} cannot read row 7 of train.parquet")
    if behaviour == "give_up":
        print("RowsError: train.parquet is not readable parquet", file=sys.stderr)
        sys.exit(CANNOT_GO_ON)
    leave_a_grandchild(arguments)
    if arguments.rank in (None, 0):
        counts = {"step": 3, "progress": {"step": 3}} if arguments.rank == 0 else {"served": 1}
        service = Service(arguments.name, arguments.run_dir.read_token(), status=lambda: counts)
        register(arguments, serve_in_thread(service, arguments.host))
    else:
        announce("waiting")
    if behaviour == "die_once" and first_time(arguments):
        raise ValueError(f"{arguments.name} dies once")
    act(behaviour, arguments)


def act(behaviour: str, arguments: RoleArguments) -> None:
    if behaviour == "finish":
        time.sleep(0.3)
        sys.exit(0)
    if behaviour == "exit0":
        sys.exit(0)
    if behaviour == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    threading.Event().wait(600)


def behaviour_of(arguments: RoleArguments) -> str:
    table = json.loads((arguments.run_dir.root / "behaviour.json").read_text())
    return table.get(arguments.name, "finish" if arguments.rank is not None else "serve")


def first_time(arguments: RoleArguments) -> bool:
    marker = arguments.run_dir.root / f"died.{arguments.name}"
    if marker.exists():
        return False
    marker.touch()
    return True


def leave_a_grandchild(arguments: RoleArguments) -> None:
    """In a session of its own, as a server's workers are."""
    words = [sys.executable, "-c", "import time; time.sleep(600)", str(arguments.run_dir.root)]
    subprocess.Popen(words, start_new_session=True)
