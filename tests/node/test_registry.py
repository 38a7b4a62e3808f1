"""The registry: real stores on real sockets, several threads of one process standing for several daemons."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from core.rpc.service import bound_socket
from launcher.node.registry import Registry, Snapshot
from tests.node.living import until

NODES = ["training-0", "inference-0"]
KEYS = ["generation", "server/a"]


class Party:
    def __init__(self, address: tuple[str, int], listener: socket.socket | None, me: str) -> None:
        self.last: Snapshot | None = None
        self.lost = ""
        self.registry = Registry(
            address, listener, me, keys=KEYS, nodes=NODES, on_snapshot=self.seen, on_lost=self.gone
        )

    def seen(self, snapshot: Snapshot) -> None:
        self.last = snapshot

    def gone(self, why: str) -> None:
        self.lost = why

    def value(self, key: str) -> str:
        return self.last.values[key] if self.last else ""


@pytest.fixture
def parties() -> Iterator[Callable[..., Party]]:
    made: list[Party] = []
    listener = bound_socket("127.0.0.1")
    listener.setblocking(True)
    address = listener.getsockname()

    def make(me: str) -> Party:
        made.append(Party(address, listener if me == "training-0" else None, me))
        return made[-1]

    yield make
    for each in made:
        each.registry.close()
    for each in made:
        if each.registry.is_alive():
            each.registry.join(10)


def test_what_is_put_before_the_host_is_up_is_not_lost(parties: Callable[..., Party]) -> None:
    host, other = parties("training-0"), parties("inference-0")
    other.registry.put("server/a", "early")
    other.registry.start()
    threading.Event().wait(1.0)  # the host comes later, as after a slower import
    host.registry.start()
    until(lambda: host.value("server/a") == "early", 30)
    host.registry.put("generation", "0")
    until(lambda: other.value("generation") == "0", 30)


def test_only_one_compare_set_wins(parties: Callable[..., Party]) -> None:
    host, other = parties("training-0"), parties("inference-0")
    host.registry.put("generation", "0")
    for each in (host, other):
        each.registry.start()
    until(lambda: other.value("generation") == "0", 30)
    other.registry.compare_set("generation", "0", "1")
    until(lambda: host.value("generation") == "1", 30)
    host.registry.compare_set("generation", "0", "7")
    host.registry.put("server/a", "after")
    until(lambda: other.value("server/a") == "after", 30)
    assert other.value("generation") == "1"


def test_beats_are_judged_by_when_they_last_moved(parties: Callable[..., Party]) -> None:
    host, other = parties("training-0"), parties("inference-0")
    for each in (host, other):
        each.registry.start()
    until(lambda: other.last and other.last.beat_ages["training-0"] < 1.5, 30)
    other.registry.close()
    other.registry.join(10)
    until(lambda: host.last and host.last.beat_ages["inference-0"] > 3, 30)
    assert host.last and host.last.beat_ages["training-0"] < 2.5


def test_nobody_at_the_address_is_a_lost_store_at_once() -> None:
    listener = bound_socket("127.0.0.1")
    address = listener.getsockname()
    listener.close()
    party = Party(address, None, "inference-0")
    party.registry.start()
    until(lambda: party.lost, 10)
