"""Seconds from an optimizer step to servers that answer with it, by size, beside this machine's file rates.

    python -m bench.weight_sync --megabytes 10 100 --check

Each size: publish into the run's directory, fetch into node-local memory (verified), pause, load, resume of a real
embedded server, by the code that a run uses. The bounds: total ≤ 0.5 s + 2 × (bytes/write + bytes/read), and
pause ≤ 1.3 × the server's own load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from core.config import Config
from core.inference.embedded.server import EmbeddedServer
from core.inference.sglang import SGLangClient
from core.rollout.pool import ServerPool
from core.rollout.update import Published, WeightUpdates
from core.weights.publish import publish
from launcher.node.fetches import Fetches
from launcher.roles.embedded_server import build
from launcher.roles.tiny.checkpoint import TinyModel, write_checkpoint

MB = 1 << 20
FIXED_SECS, FACTOR, PAUSE_FACTOR = 0.5, 2.0, 1.3
TOKEN = "bench"


@dataclass(frozen=True)
class Row:
    megabytes: float
    publish: float
    fetch: float
    load: float
    pause: float
    total: float
    own_load: float
    write_mb_s: float
    read_mb_s: float

    @property
    def bound(self) -> float:
        return FIXED_SECS + FACTOR * (self.megabytes / self.write_mb_s + self.megabytes / self.read_mb_s)

    @property
    def holds(self) -> bool:
        return self.total <= self.bound and self.pause <= PAUSE_FACTOR * self.own_load + 0.05


def shape(megabytes: float) -> TinyModel:
    """A model of about this size in float32."""
    hidden, heads = (128, 4) if megabytes < 60 else (1024, 16)
    layer = 4 * (3 * hidden * 4 * hidden + 2 * hidden * hidden + hidden * hidden) / MB
    layers = max(1, round(megabytes / layer))
    return TinyModel(hidden=hidden, heads=heads, kv_heads=heads // 2, intermediate=4 * hidden, layers=layers, shards=1)


def file_rates(directory: Path, memory: Path, size: int) -> tuple[float, float]:
    """MB/s of writing (synced) where versions are published, and of reading that file into node-local memory."""
    block = os.urandom(8 * MB)
    path, copy = directory / "rate", memory / "rate"
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(max(1, size // len(block))):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    wrote = time.perf_counter() - began
    began = time.perf_counter()
    shutil.copyfile(path, copy)
    read = time.perf_counter() - began
    bytes_ = path.stat().st_size
    path.unlink()
    copy.unlink()
    return bytes_ / MB / wrote, bytes_ / MB / read


async def measure(megabytes: float, directory: Path, memory: Path) -> Row:
    model = directory / "model"
    write_checkpoint(model, shape(megabytes))
    config = Config.model_validate(
        {
            "experiment_name": "bench",
            "trial_name": "sync",
            "train_dataset": {"path": "none", "batch_size": 1},
            "actor": {"path": str(model)},
            "embedded": {"context_length": 64, "max_running_requests": 1},
        }
    )
    server = build(model, config, "cpu", TOKEN)
    tensors = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    loop = threading.Thread(target=server.engine.start)
    loop.start()
    loop.join()
    url = await server.start()
    try:
        return await _measured(server, url, tensors, size, directory, memory)
    finally:
        await server.stop()
        await asyncio.to_thread(server.engine.stop)


async def _measured(
    server: EmbeddedServer, url: str, tensors: dict[str, torch.Tensor], size: int, directory: Path, memory: Path
) -> Row:
    weights = directory / "weights"
    weights.mkdir()
    fetches = Fetches(weights, memory)
    row = {"name": "server-0", "url": url, "backend": "embedded", "daemon": "here", "state": "up", "started": 1.0}

    async def registry() -> dict[str, Any]:
        return {"servers": [row]}

    async def nothing(*args: Any) -> None:
        return None

    async def fetch(daemon: str, version: Published) -> str:
        return (await fetches.get(version.name, version.path, version.digest))["path"]

    pool = ServerPool(registry, lambda found: SGLangClient(found["url"], TOKEN), nothing, server_deadline=600)
    updates = WeightUpdates(pool, fetch, nothing)
    tasks = [asyncio.create_task(pool.watch()), asyncio.create_task(updates.run())]
    seconds: list[dict[str, float]] = []
    for number in range(3):  # the first one brings the server in, the second warms up
        name = f"v{number:06d}-r0"
        done, began = time.time(), time.perf_counter()
        manifest = await asyncio.to_thread(_publish, weights, name, tensors, number)
        published = time.perf_counter() - began
        path = str(weights / name)
        updates.publish(Published(number, 0, name, path, manifest.digest, number, done))
        while not updates.syncs or updates.syncs[-1]["version"] != number:  # noqa: ASYNC110  it has no event
            await asyncio.sleep(0.005)
        seconds.append({"publish": published, **updates.syncs[-1], "own_load": server.engine.load_secs})
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await pool.close()
    write, read = await asyncio.to_thread(file_rates, directory, memory, size)
    last = seconds[-1]
    return Row(
        round(size / MB, 1),
        *(round(last[key], 3) for key in ("publish", "fetch", "load", "pause", "secs", "own_load")),
        round(write, 1),
        round(read, 1),
    )


def _publish(weights: Path, name: str, tensors: dict[str, torch.Tensor], number: int) -> Any:
    return publish(
        weights,
        name,
        tensors,
        weights.parent / "model",
        rank=0,
        world=1,
        gather=lambda item: [item],
        barrier=lambda: None,
        version=number,
        generation=0,
        lineage=[(number, 0)],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="weight sync by size, beside this machine's file rates")
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10, 100, 500, 2000])
    parser.add_argument("--directory", type=Path, help="where versions are published [a temporary directory]")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="node-local memory [/dev/shm]")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound does not hold")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for megabytes in arguments.megabytes:
        with (
            tempfile.TemporaryDirectory(dir=arguments.directory) as directory,
            tempfile.TemporaryDirectory(dir=arguments.memory) as memory,
        ):
            row = asyncio.run(measure(megabytes, Path(directory), Path(memory)))
        rows.append(row)
        print(json.dumps({**asdict(row), "bound": round(row.bound, 3), "holds": row.holds}), flush=True)
    return int(arguments.check and not all(row.holds for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
