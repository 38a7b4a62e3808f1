"""Published versions in this node's memory: each is fetched once, whoever asks and however often.

Owns the order of fetches on this node; copying and verification are core.weights.fetch.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.rpc.errors import RpcError
from core.telemetry.phases import announce
from core.weights.errors import WeightsError
from core.weights.fetch import fetch, fetched, release, version_name
from core.weights.manifest import Manifest, VerifyMode
from launcher.node import agreed


@dataclass
class Fetches:
    weights: Path
    """The run directory's weights/: nothing outside it is read."""
    local: Path
    verify: VerifyMode = "full"
    visible_secs: float = 90.0
    links: Path | None = None
    """Where versions are at the same path on every node, if a server here spans several (launcher.node.agreed)."""
    last: Manifest | None = None
    running: dict[tuple[str, str], asyncio.Task[dict[str, Any]]] = field(default_factory=dict)

    async def get(self, name: str, path: str, digest: str) -> dict[str, Any]:
        source = self._inside(name, path)
        key = (name, digest)
        task = self.running.get(key)
        if task is None:
            task = self.running[key] = asyncio.create_task(self._fetch(source, digest))
            task.add_done_callback(lambda _: self.running.pop(key, None))
        try:
            return await asyncio.shield(task)
        except WeightsError as error:
            raise RpcError(409, str(error)) from error

    async def release(self, name: str) -> None:
        try:
            if self.links is None:
                await asyncio.to_thread(release, self.local, name)
            else:
                await asyncio.to_thread(agreed.let_go, self.links, self.local / version_name(name))
        except WeightsError as error:
            raise RpcError(400, str(error)) from error

    async def _fetch(self, source: Path, digest: str) -> dict[str, Any]:
        started = time.monotonic()
        announce("fetch")
        cached = await asyncio.to_thread(fetched, self.local, source.name, digest) is not None
        options: dict[str, Any] = {"verify": self.verify, "visible_secs": self.visible_secs, "expected": self.last}
        target = await asyncio.to_thread(fetch, source, digest, self.local, **options)
        self.last = await asyncio.to_thread(fetched, self.local, source.name, digest)
        if self.links is not None:
            target = await asyncio.to_thread(agreed.lead_to, self.links, target)
        size = self.last.weight_bytes if self.last else 0
        return {"path": str(target), "bytes": size, "secs": time.monotonic() - started, "cached": cached}

    def _inside(self, name: str, path: str) -> Path:
        source = Path(path).resolve()
        if source.parent != self.weights.resolve() or source.name != name:
            raise RpcError(400, f"{path} is not the version {name!r} of this run ({self.weights})")
        return source
