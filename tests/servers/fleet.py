"""Real servers under one pool, as the rollout service has them: registry, updates, requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from core.inference.client import Generation, Images, InferenceClient, Request
from core.inference.sglang import SGLangClient
from core.rollout.pool import ServerPool
from core.rollout.servers import Server, ServerState
from core.rollout.update import Published, WeightUpdates
from tests.embedded.harness import TOKEN

V1, V2 = "v000001-r0", "v000002-r0"


class Watched(SGLangClient):
    """Says who is paused while who else is."""

    paused: ClassVar[set[str]] = set()
    most = 0
    """Servers paused at once."""
    asked = busiest = 0
    """Requests at once, of all of them."""

    async def generate_ids(self, *args: Any, **more: Any) -> Generation:
        Watched.asked += 1
        Watched.busiest = max(Watched.busiest, Watched.asked)
        try:
            return await super().generate_ids(*args, **more)
        finally:
            Watched.asked -= 1

    async def pause(self, *, timeout: float = 120.0) -> None:
        await super().pause(timeout=timeout)
        Watched.paused.add(self.url)
        Watched.most = max(Watched.most, len(Watched.paused))

    async def resume(self, *, timeout: float = 120.0) -> None:
        Watched.paused.discard(self.url)
        await super().resume(timeout=timeout)


@dataclass
class Fleet:
    pool: ServerPool
    updates: WeightUpdates
    restarted: list[str]
    directories: dict[tuple[str, str], Path] = field(default_factory=dict)
    """(daemon, version) to another directory than the published one."""

    def publish(self, name: str, number: int) -> None:
        self.updates.publish(Published(number, 0, name, name, "", number, time.time()))

    async def until(self, holds: Any, secs: float = 60) -> None:
        async with asyncio.timeout(secs):
            while not holds():  # noqa: ASYNC110  states have no event
                await asyncio.sleep(0.005)

    def on(self, name: str) -> list[str]:
        servers = self.pool.servers.values()
        return [each.name for each in servers if each.state is ServerState.SERVING and each.served_name == name]


@asynccontextmanager
async def fleet(
    urls: list[str],
    versions: dict[str, Path],
    *,
    share: float | None = None,
    client: Callable[[str], InferenceClient] = lambda url: Watched(url, TOKEN),
) -> AsyncIterator[Fleet]:
    """Every server on a node of its own; all on V1."""
    rows = [
        {"name": f"server-{i}", "url": url, "backend": "embedded", "daemon": f"node-{i}", "state": "up", "started": 1.0}
        for i, url in enumerate(urls)
    ]
    restarted: list[str] = []

    async def registry() -> dict[str, Any]:
        return {"servers": rows}

    async def restart(server: Server) -> None:
        restarted.append(server.name)

    async def fetch(daemon: str, version: Published) -> str:
        return str(made.directories.get((daemon, version.name), versions[version.name]))

    async def release(daemon: str, name: str) -> None:
        return None

    Watched.paused, Watched.most, Watched.asked, Watched.busiest = set(), 0, 0, 0
    pool = ServerPool(registry, lambda row: client(row["url"]), restart, server_deadline=6, poll_secs=0.05)
    made = Fleet(pool, WeightUpdates(pool, fetch, release, rolling_share=share), restarted)
    tasks = [asyncio.create_task(pool.watch()), asyncio.create_task(made.updates.run())]
    try:
        made.publish(V1, 1)
        await made.until(lambda: len(made.on(V1)) == len(urls))
        Watched.most = 0
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for server in pool.servers.values():
            with suppress(Exception):
                await server.client.resume()
        await pool.close()


def request(number: int, tokens: int) -> Request:
    ids = [5 + number % 300, 17, 40 + number % 100]
    return Request(f"r{number}", ids, Images(), {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True})


async def ask(pool: ServerPool, number: int, tokens: int) -> Generation:
    """As the workflow does."""
    server = await pool.acquire()
    return await server.generate(request(number, tokens), stream=True, partial=Generation())
