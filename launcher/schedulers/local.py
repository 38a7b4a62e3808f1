"""Every node daemon on this machine, on loopback.

Attached (`run`): each daemon runs under a guard that holds a pipe to this process; when this process is gone, however
it went, the guard ends the daemon and all below it. Detached (`submit`): each daemon has a session of its own and is
the root of its tree.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from launcher.launch import Launch
from launcher.node import guard
from launcher.node.local_dir import local_root
from launcher.node.specs import LOOPBACK, REPOSITORY, lead_node
from launcher.planning.devices import visible_gpus
from launcher.schedulers.base import daemon_command

DAEMON_GRACE = 20.0
"""On top of the children's grace: a daemon that is asked to end first ends its children."""


class LocalPlacement:
    def __init__(self, daemons: dict[str, subprocess.Popen[bytes]]) -> None:
        self.daemons = daemons

    def exits(self) -> dict[str, int | None]:
        return {name: process.poll() for name, process in self.daemons.items()}

    def stop(self) -> None:
        for process in self.daemons.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)


class LocalScheduler:
    def place(self, launch: Launch, *, attached: bool) -> LocalPlacement:
        nodes = [(partition.name, node.index) for partition in launch.plan.partitions for node in partition.nodes]
        nodes.sort(key=lambda node: f"{node[0]}-{node[1]}" != lead_node(launch.plan))
        return LocalPlacement({f"{name}-{index}": self._start(launch, name, index, attached) for name, index in nodes})

    def _start(self, launch: Launch, partition: str, node: int, attached: bool) -> subprocess.Popen[bytes]:
        command = daemon_command(launch, partition, node, LOOPBACK)
        if attached:
            grace = launch.grace + DAEMON_GRACE
            local = local_root(launch.local, launch.plan.run_id, launch.run_dir) / f"{partition}-{node}"
            words = [sys.executable, "-S", "-E", "-P", str(Path(guard.__file__)), "--grace", str(grace)]
            command = [*words, "--empty", str(local), "--", *command]
        with launch.run_dir.log(launch.attempt, partition, node, "daemon").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE if attached else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(launch),
                start_new_session=True,
            )


def _environment(launch: Launch) -> dict[str, str]:
    paths = [str(REPOSITORY), *(each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}
    if launch.plan.device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"
    else:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus())
    return environment
