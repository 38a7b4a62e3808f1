"""What a scheduler is: it places the node daemons of one attempt and says how they are. Torch-free."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Protocol

from launcher.launch import Launch


class Placement(Protocol):
    """The node daemons of one attempt, as placed."""

    def exits(self) -> Mapping[str, int | None]:
        """Exit status by node name, None while it runs."""

    def stop(self) -> None:
        """Asks every daemon to end its node. A second call does not wait for the grace."""


class Scheduler(Protocol):
    def place(self, launch: Launch, *, attached: bool) -> Placement:
        """Starts the daemons. Attached: they end with this process, whatever ends it."""


def daemon_command(launch: Launch, partition: str, node: int, host: str) -> list[str]:
    """What runs on a node, whoever starts it there."""
    return [
        *(sys.executable, "-P", "-m", "launcher.node"),
        *("--run-dir", str(launch.run_dir.root), "--attempt", str(launch.attempt)),
        *("--partition", partition, "--node", str(node), "--host", host),
        *("--roles", launch.roles, "--grace", str(launch.grace)),
    ]
