"""Versions of a server over several nodes: each of its nodes has one before the server hears of it, at one path."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from core.inference.sglang import SGLangClient
from core.rollout.pool import ServerPool
from core.rollout.servers import Server, ServerState
from core.rollout.update import Published, WeightUpdates
from tests.rollout.stub_server import StubServer

TOKEN = "secret"
NODES = {"server-0": ["node-0", "node-1"], "server-1": ["node-2", "node-3"]}


@dataclass
class Nodes:
    """Stands in for the daemons of four nodes."""

    calls: list[tuple[str, str, str]] = field(default_factory=list)
    without: set[str] = field(default_factory=set)
    at: dict[str, str] = field(default_factory=dict)
    """Where a node keeps its versions, if not where the others do."""

    async def fetch(self, daemon: str, version: Published) -> str:
        self.calls.append(("fetch", daemon, version.name))
        if daemon in self.without:
            raise OSError(f"{daemon} has no room")
        return f"{self.at.get(daemon, '/run/served')}/{version.name}"

    async def release(self, daemon: str, name: str) -> None:
        self.calls.append(("release", daemon, name))


def with_two_servers(scenario: Callable[[ServerPool, WeightUpdates, Nodes], Any]) -> None:
    async def driven() -> None:
        stubs = [StubServer(name, token=TOKEN) for name in NODES]
        urls = [await stub.start() for stub in stubs]
        nodes, restarted = Nodes(), []

        async def registry() -> dict[str, Any]:
            return {"servers": [{**each.row(NODES[each.name][0]), "daemons": NODES[each.name]} for each in stubs]}

        async def restart(server: Server) -> None:
            restarted.append(server.name)

        pool = ServerPool(
            registry, lambda row: SGLangClient(row["url"], TOKEN), restart, server_deadline=30, poll_secs=30
        )
        updates = WeightUpdates(pool, nodes.fetch, nodes.release)
        tasks = [asyncio.create_task(pool.watch()), asyncio.create_task(updates.run())]
        try:
            updates.publish(version(1))
            await until(lambda: served(pool) == {"server-0": "v000001-r0", "server-1": "v000001-r0"})
            await scenario(pool, updates, nodes)
            assert restarted == [] and len(urls) == 2
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await pool.close()
            for stub in stubs:
                await stub.die()

    asyncio.run(asyncio.wait_for(driven(), 60))


def version(number: int) -> Published:
    return Published(number, 0, f"v{number:06d}-r0", f"/w/v{number:06d}-r0", "d", number, time.time())


def served(pool: ServerPool) -> dict[str, str | None]:
    return {name: each.served_name for name, each in pool.servers.items() if each.state is ServerState.SERVING}


async def until(holds: Callable[[], bool], secs: float = 20) -> None:
    async with asyncio.timeout(secs):
        while not holds():  # noqa: ASYNC110  states have no event
            await asyncio.sleep(0.005)


def test_every_node_of_a_server_fetches_and_lets_go() -> None:
    async def scenario(pool: ServerPool, updates: WeightUpdates, nodes: Nodes) -> None:
        updates.publish(version(2))
        await until(lambda: served(pool) == dict.fromkeys(NODES, "v000002-r0"))
        await until(lambda: len(nodes.calls) == 12)
        for what, name in (("fetch", "v000001-r0"), ("fetch", "v000002-r0"), ("release", "v000001-r0")):
            assert sorted(call for call in nodes.calls if call[::2] == (what, name)) == [
                (what, f"node-{number}", name) for number in range(4)
            ]

    with_two_servers(scenario)


@pytest.mark.parametrize("reason", ["no room", "different paths"])
def test_a_node_without_a_version_takes_its_server_out_by_name(reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario(pool: ServerPool, updates: WeightUpdates, nodes: Nodes) -> None:
        if reason == "no room":
            nodes.without.add("node-1")
        else:
            nodes.at["node-1"] = "/elsewhere"
        updates.publish(version(2))
        await until(lambda: served(pool) == {"server-1": "v000002-r0"})
        assert pool.servers["server-0"].state is ServerState.OUT

    with_two_servers(scenario)
    said = capfd.readouterr().err
    assert "server server-0 (" in said and "its node did not get v000002-r0" in said and reason in said


def test_a_version_that_no_server_can_have_is_refused_and_the_old_one_stays() -> None:
    async def scenario(pool: ServerPool, updates: WeightUpdates, nodes: Nodes) -> None:
        nodes.without |= {"node-1", "node-2"}
        updates.publish(version(2))
        await until(lambda: len([call for call in nodes.calls if call[2] == "v000002-r0"]) >= 8)
        assert served(pool) == dict.fromkeys(NODES, "v000001-r0")
        nodes.without.clear()
        await until(lambda: served(pool) == dict.fromkeys(NODES, "v000002-r0"))

    with_two_servers(scenario)
