"""The surroundings of a rollout service: a node daemon, a data service, servers; each on a real port.

Rows are numbered; row i shows one grey image of shade i. The services speak core.rpc, as the real
ones do; what they answer is written here from the contract.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from PIL import Image

from core.config import Config, load
from core.rollout.service import Routes
from core.rollout.session import Places, Session
from core.rpc.client import AsyncClient
from core.rpc.errors import RpcError
from core.rpc.service import Call, Service
from tests.rollout.stub_server import IMAGE_PAD, STOP, StubServer

TOKEN = "secret"
ROWS = 12


class StubTokenizer:
    """Ids as text: answers are graded by what they are made of."""

    stop_ids = (STOP,)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return " ".join(str(i) for i in ids if not (skip_special and i == STOP))

    def token_id(self, token: str) -> int:
        return {"<|image_pad|>": IMAGE_PAD, "<|video_pad|>": 6}[token]


def png_of(row: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (56, 28 * (1 + row % 3)), (row, row, row)).save(out, "PNG")
    return out.getvalue()


class StubData:
    """`batch_size` rows of an epoch are dropped from its tail, as drop_last does."""

    def __init__(self, *, epochs: int = 1, rows: int = ROWS, bad: Sequence[int] = (), token: str = TOKEN) -> None:
        self.epochs = epochs
        self.rows = rows
        self.bad = set(bad)
        self.asked: list[tuple[int, int]] = []
        self.images_asked: list[str] = []
        self.service = Service("data", token)
        self.service.get("/prompts", self._prompts)
        self.service.get("/images/{hash}", self._image)

    async def _prompts(self, call: Call) -> dict:
        split, n = call.query["split"], int(call.query["n"])
        epoch, position = int(call.query["epoch"]), int(call.query["position"])
        epochs = self.epochs if split == "train" else 1
        prompts: list[dict[str, Any]] = []
        while len(prompts) < n and epoch < epochs:
            self.asked.append((epoch, position))
            prompts.append(self.prompt(split, epoch, position))
            position += 1
            if position == self.rows:
                epoch, position = epoch + 1, 0
        return {"prompts": prompts, "next": {"epoch": epoch, "position": position} if epoch < epochs else None}

    def prompt(self, split: str, epoch: int, position: int) -> dict[str, Any]:
        head = {"prompt_id": f"{split}-{position}", "row_index": position, "epoch": epoch, "position": position}
        if position in self.bad:
            return {**head, "error": f"rows.parquet:{position}: column answer is empty"}
        cells = 2 * (1 + position % 3)
        before, after = [10, 11], [12, 13 + position]
        image = {
            "hash": f"{position:032x}",
            "original": [100, 100],
            "resized": [28 * (1 + position % 3), 56],
            "grid_thw": [1, 2 * (1 + position % 3), 4],
        }
        return {
            **head,
            "input_ids": [*before, IMAGE_PAD, *after],
            "expanded_ids": [*before, *[IMAGE_PAD] * cells, *after],
            "images": [image],
            "row": {"answer": str(position), "problem": "<image>?"},
            "prompt_text": f"row {position}",
        }

    async def _image(self, call: Call) -> bytes:
        self.images_asked.append(call.path["hash"])
        return png_of(int(call.path["hash"], 16))


class StubDaemon:
    """Says which servers there are; fetches at once."""

    def __init__(self, servers: Sequence[StubServer], *, token: str = TOKEN) -> None:
        self.servers = {server.name: server for server in servers}
        self.down: set[str] = set()
        self.refuse_fetch = 0
        self.calls: list[str] = []
        self.registered: dict[str, str] = {}
        self.data_url = ""
        self.service = Service("daemon", token)
        self.service.get("/registry", self._registry)
        self.service.post("/fetch", self._fetch)
        self.service.post("/release", self._said("release"))
        self.service.post("/restart", self._said("restart"))
        self.service.post("/register", self._register)

    async def _registry(self, call: Call) -> dict:
        rows = [server.row(self.service.url) for server in self.servers.values()]
        for row in rows:
            row["state"] = "down" if row["name"] in self.down else "up"
        return {
            "services": {"data": self.data_url},
            "servers": rows,
            "daemons": [],
            "phase": "running",
            "generation": 0,
        }

    async def _fetch(self, call: Call) -> dict:
        body = call.json()
        self.calls.append(f"fetch {body['name']}")
        if self.refuse_fetch > 0:
            self.refuse_fetch -= 1
            raise RpcError(409, f"{body['path']}: model.norm.weight: bit flip")
        return {"path": f"/local/{body['name']}", "bytes": 1, "secs": 0.0, "cached": False}

    async def _register(self, call: Call) -> dict:
        body = call.json()
        self.registered[body["name"]] = body["url"]
        return {}

    def _said(self, what: str) -> Any:
        async def answer(call: Call) -> dict:
            self.calls.append(f"{what} {call.json()['name']}")
            return {}

        return answer


CONFIG = """
experiment_name: stub
trial_name: run
allocation_mode: embedded:d2+archon:d1
reward: exact_match
cluster: {{fileroot: {root}}}
train_dataset: {{path: {root}, batch_size: 2}}
valid_dataset: {{path: {root}}}
gconfig: {{n_samples: 2, max_new_tokens: 8}}
actor: {{path: {root}}}
rollout: {{max_head_offpolicyness: 1, server_deadline: 5, setup_timeout: 5, reward_timeout: 2, parity: off}}
"""


def config_in(root: Path, *overrides: str) -> Config:
    path = root / "config.yaml"
    path.write_text(CONFIG.format(root=root))
    return load(path, list(overrides))


def places_in(root: Path) -> Places:
    rollouts = root / "rollouts"
    (root / "weights").mkdir(exist_ok=True)
    return Places(
        rollouts / "batches",
        rollouts / "images",
        rollouts / "index.jsonl",
        root / "void.jsonl",
        root / "weights",
        root,
    )


class Run:
    """A real session behind real HTTP, in the middle of the stubs."""

    def __init__(
        self, root: Path, config: Config, servers: list[StubServer], daemon: StubDaemon, data: StubData
    ) -> None:
        self.root = root
        self.config = config
        self.servers = servers
        self.daemon = daemon
        self.data = data
        self.exit: asyncio.Task[int]

    async def start_session(self, attempt: int = 1) -> None:
        self.session = Session(
            self.config,
            places_in(self.root),
            StubTokenizer(),  # type: ignore[arg-type]
            token=TOKEN,
            daemon=self.daemon.service.url,
            attempt=attempt,
            context_length=None,
        )
        await self.serve_session()

    async def serve_session(self) -> None:
        self.service = Service("rollout", TOKEN, status=self.session.status, metrics=self.session.metrics)
        Routes(self.session, can_evaluate=True).add_to(self.service)
        self.client = AsyncClient(await self.service.start(), TOKEN)
        self.session.linger_secs = 0.5
        self.exit = asyncio.create_task(self.session.run())

    async def stop_session(self) -> int:
        self.session.stop()
        code = await self.exit
        await self.client.close()
        await self.service.stop()
        return code

    async def publish(self, version: int, *, step: int | None = None, generation: int = 0) -> None:
        name = f"v{version:06d}-r{generation}"
        body = {
            "version": version,
            "generation": generation,
            "name": name,
            "path": str(self.root / "weights" / name),
            "digest": "d",
            "step": version if step is None else step,
            "optimizer_done": asyncio.get_running_loop().time(),
        }
        await self.client.post("/publish", body)

    async def serve(self, version: int, **where: int) -> None:
        await self.publish(version, **where)
        await self.until(lambda status: status["served"] == version, f"version {version} is served")

    async def until(self, holds: Any, what: str, secs: float = 20.0) -> dict[str, Any]:
        """Looks at /status until it holds."""
        deadline = asyncio.get_running_loop().time() + secs
        while True:
            status = await self.client.get("/status")
            if holds(status):
                return status
            assert asyncio.get_running_loop().time() < deadline, f"never: {what}; {status}"
            await asyncio.sleep(0.02)

    async def batch(self, step: int, wait: float = 20.0) -> dict[str, Any]:
        return await self.client.get(f"/batches/{step}", wait=wait, timeout=wait + 10)

    async def samples(self, step: int, indices: Sequence[int]) -> bytes:
        return await self.client.get_bytes(f"/batches/{step}/samples", indices=",".join(map(str, indices)))


@asynccontextmanager
async def stub_run(
    root: Path,
    *overrides: str,
    servers: int = 2,
    epochs: int = 1,
    bad: Sequence[int] = (),
    rows: int = ROWS,
) -> AsyncIterator[Run]:
    """Everything up, nothing published yet. The servers can be changed before anything is asked of them."""
    stubs = [StubServer(f"server-{i}", token=TOKEN) for i in range(servers)]
    for stub in stubs:
        await stub.start()
    data, daemon = StubData(epochs=epochs, rows=rows, bad=bad), StubDaemon(stubs)
    daemon.data_url = await data.service.start()
    await daemon.service.start()
    run = Run(root, config_in(root, *overrides), stubs, daemon, data)
    await run.start_session()
    try:
        yield run
    finally:
        await run.stop_session()
        for stub in run.servers:
            await stub.die()
        await daemon.service.stop()
        await data.service.stop()
