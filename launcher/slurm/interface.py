"""Which address of a node the run uses: `slurm.interface`, else the one that leads to training node 0."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from core.config import UserError


class InterfaceError(UserError):
    """The network interface that was asked for cannot be used on this node."""


@dataclass(frozen=True)
class Interface:
    name: str
    address: str
    why: str


def choose(asked: str | None, me: str, training_first: str, others: Sequence[str]) -> Interface:
    """`others`: the job's other nodes and the host that submitted, tried in order where this is training node 0."""
    table = addresses()
    if asked:
        if asked not in table:
            raise InterfaceError(f"slurm.interface: {me} has no {asked} with an IPv4 address, only {', '.join(table)}")
        return Interface(asked, table[asked], "slurm.interface")
    targets = [training_first] if training_first != me else [each for each in others if each != me]
    for target in targets:
        address = source_towards(target)
        if address is not None:
            return Interface(name_of(address, table), address, f"the route to {target}")
    address = source_towards(me) or "127.0.0.1"
    return Interface(name_of(address, table), address, "no other node to reach")


def addresses() -> dict[str, str]:
    """The first IPv4 address of each interface."""
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET and name not in found:
                found[name] = entry.address
    return found


def source_towards(host: str) -> str | None:
    """The address that packets to `host` would leave from; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((socket.gethostbyname(host), 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def name_of(address: str, table: dict[str, str]) -> str:
    return next((name for name, own in table.items() if own == address), "lo" if address.startswith("127.") else "")
