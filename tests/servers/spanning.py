"""One server in two parts under two node daemons of this machine, and a pool that asks it as rollouts do."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from core.config import Config
from core.inference.client import Generation, Images, Request
from core.inference.sglang import SGLangClient
from core.inference.vllm import VLLMClient
from core.rollout.links import Daemons
from core.rollout.pool import ServerPool
from core.rollout.servers import Server as Pooled
from core.rollout.servers import ServerState
from core.rollout.update import Published, WeightUpdates
from core.weights.manifest import NAME, Manifest
from launcher.launch import Launch, begin
from launcher.node.local_dir import local_root
from launcher.node.state import read_rendezvous
from launcher.plan import BatchPlan, Node, Partition, Plan, Server
from launcher.run_dir import RunDir
from launcher.schedulers.local import LocalScheduler
from tests.node.living import processes_naming, until
from tests.servers.conftest import publish_alone

NO_BATCH = BatchPlan(0, 0, 0, 0, 0, 0, 0, None)
PARTS = ("server-0", "server-0-part-1")


def two_nodes(backend: str, cut: str) -> Plan:
    """As placement makes it of `t2` or `p2` on nodes of one GPU, but without the GPUs."""
    nodes = [Node(index, index, [], [Server("server-0", [], index, 2)], []) for index in (0, 1)]
    tensor, pipeline = {"t2": (2, 1), "p2": (1, 2)}[cut]
    partition = Partition("inference", backend, 1, pipeline, tensor, 1, 1, nodes)
    return Plan("spanning", "cpu", False, [], [], [partition], NO_BATCH, [], 0, [], [], {})


@dataclass
class Spanning:
    run_dir: RunDir
    launch: Launch
    daemons: Daemons
    pool: ServerPool
    updates: WeightUpdates
    local: Path

    def publish(self, number: int, content: dict[str, torch.Tensor], model: Path) -> str:
        directory = publish_alone(self.run_dir.weights, number, content, model)
        digest = Manifest.from_json((directory / NAME).read_bytes(), directory / NAME).digest
        version = Published(number, 0, directory.name, str(directory), digest, number, time.time())
        self.updates.publish(version)
        return directory.name

    async def until(self, holds: Callable[[], Any], secs: float) -> None:
        deadline = time.monotonic() + secs
        while not holds():
            assert time.monotonic() < deadline, self.said()
            await asyncio.sleep(0.02)

    async def until_serving(self, name: str, secs: float, *, but: str = "") -> Pooled:
        """On that version, by another start than `but`."""

        def serves() -> bool:
            server = self.pool.servers.get("server-0")
            return server is not None and server.state is ServerState.SERVING and server.served_name == name

        deadline = time.monotonic() + secs
        while not serves() or await self.start() in ("", but):
            assert time.monotonic() < deadline, self.said()
            await asyncio.sleep(0.05)
        return self.pool.servers["server-0"]

    async def start(self) -> str:
        """Of the head; empty while its parts are not all in it."""
        found = await self.daemons.registry()
        start = found["meetings"].get("server-0", {}).get("start", "")
        return start if all(row["start"] == start and row["state"] == "up" for row in found["parts"]) else ""

    def kill(self, name: str, *, role: bool = False) -> None:
        """kill -9 of the server's own first process behind that role, or of the role."""
        (mine,) = [
            int(line.split()[0])
            for line in processes_naming(str(self.run_dir.root))
            if f"--name {name} " in line and "guard.py" not in line
        ]
        if role:
            os.kill(mine, signal.SIGKILL)
            return
        for each in psutil.Process(mine).children():
            each.kill()

    def said(self) -> str:
        logs = sorted((self.run_dir.logs / "1").glob("*/*.log"))
        return "\n".join(f"── {path}\n{path.read_text()[-3000:]}" for path in logs)


@asynccontextmanager
async def spanning(config: Config, backend: str, first_secs: float, *, cut: str = "t2") -> AsyncIterator[Spanning]:
    launch = begin(config, two_nodes(backend, cut))
    run_dir = launch.run_dir
    placement = LocalScheduler().place(launch, attached=True)
    token = run_dir.read_token()
    local = local_root(None, launch.plan.run_id, run_dir)
    try:
        found = await asyncio.to_thread(until, lambda: read_rendezvous(run_dir, 1), 60, "rendezvous")
        daemons = Daemons(found.daemon, token, fetch_timeout=60)
        client = {"sglang": SGLangClient, "vllm": VLLMClient}[backend]
        pool = ServerPool(
            daemons.registry, lambda row: client(row["url"], token), daemons.restart, server_deadline=120, poll_secs=0.1
        )
        made = Spanning(run_dir, launch, daemons, pool, WeightUpdates(pool, daemons.fetch, daemons.release), local)
        tasks = [asyncio.create_task(pool.watch()), asyncio.create_task(made.updates.run())]
        try:
            await made.until(lambda: pool.servers, first_secs)
            yield made
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await pool.close()
            await daemons.close()
    finally:
        placement.stop()
        for process in placement.daemons.values():
            try:
                await asyncio.to_thread(process.wait, 60)
            finally:
                process.kill()


async def ask(server: Pooled, ids: list[int], count: int) -> Generation:
    sampling = {"temperature": 1.0, "max_new_tokens": count, "ignore_eos": True}
    request = Request(f"r{time.monotonic_ns()}", ids, Images(), sampling)
    return await server.generate(request, stream=False, partial=Generation())
