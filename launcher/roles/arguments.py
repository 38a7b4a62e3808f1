"""What every child of a node daemon is told on its command line, and how it tells its daemon where it listens.

Torch-free; a role calls `parse` first. It decides nothing: the daemon's table of children (launcher.node.specs) writes
these arguments.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from core.rpc.client import Client
from core.telemetry.phases import open_phases
from launcher.run_dir import RunDir

PHASES = "phases"
"""Directory of the announcements of a node's processes, below its node-local one."""


@dataclass(frozen=True)
class RoleArguments:
    run_dir: RunDir
    attempt: int
    partition: str
    node: int
    name: str
    daemon: str
    local: Path
    """Node-local scratch of this node: memory or local disk, emptied when the run ends."""
    host: str = "127.0.0.1"
    """The interface that a service of this process binds (port 0)."""
    rank: int | None = None
    world: int | None = None
    local_rank: int | None = None
    generation: int = 0
    store: str | None = None
    """host:port of the registry's TCPStore; ranks only."""
    gpus: tuple[int, ...] = ()
    """GPUs of a server on its node; CUDA_VISIBLE_DEVICES is set already, so that its devices count from 0."""


def parse(argv: Sequence[str]) -> RoleArguments:
    """Reads the arguments; from now on SIGUSR1 writes the stack of every thread to the log."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # a batch scheduler's warning goes to every process of a step; the daemon and the ranks answer it
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    parser = argparse.ArgumentParser(description="one process of a run, started by its node daemon")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--partition", required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--daemon", required=True, help="URL of the node daemon")
    parser.add_argument("--local", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--world", type=int)
    parser.add_argument("--local-rank", type=int)
    parser.add_argument("--generation", type=int, default=0)
    parser.add_argument("--store")
    parser.add_argument("--gpus", default="", help="comma-separated")
    found = parser.parse_args(argv)
    fields = {**vars(found), "run_dir": RunDir(found.run_dir.absolute())}
    fields["gpus"] = tuple(int(gpu) for gpu in found.gpus.split(",") if gpu)
    open_phases(found.local / PHASES, found.name)
    return RoleArguments(**fields)


def register(arguments: RoleArguments, url: str) -> None:
    """Publishes where this process answers; the daemon passes it on to the whole run."""
    client = Client(arguments.daemon, arguments.run_dir.read_token())
    request = f"{arguments.name}-{os.getpid()}-{url}"
    client.post("/register", {"name": arguments.name, "url": url, "pid": os.getpid()}, request_id=request)
    client.close()
