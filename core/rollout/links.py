"""The calls that the rollout service makes to the node daemons: registry, fetch, release, restart.

Owns the clients; when which call is made is the pool's and the updates' business.
"""

from __future__ import annotations

import sys
from typing import Any

from core.rollout.servers import Server
from core.rollout.update import Published
from core.rpc.client import AsyncClient
from core.rpc.errors import RpcError


class Daemons:
    """`daemon` is the one of this node; the others are found through its registry."""

    def __init__(self, daemon: str, token: str, *, fetch_timeout: float) -> None:
        self._own = daemon
        self._token = token
        self._fetch_timeout = fetch_timeout
        self._clients: dict[str, AsyncClient] = {}

    async def registry(self) -> dict[str, Any]:
        return await self._client(self._own).get("/registry", timeout=10.0)

    async def data_url(self) -> str | None:
        try:
            return (await self.registry()).get("services", {}).get("data")
        except RpcError as error:
            raise RpcError(0, f"the registry does not answer: {error}", self._own) from error

    async def fetch(self, daemon: str, version: Published) -> str:
        """The verified copy on that daemon's node; raises RpcError with the reason where there is none."""
        body = {"name": version.name, "path": version.path, "digest": version.digest}
        answer = await self._client(daemon).post("/fetch", body, timeout=self._fetch_timeout)
        return answer["path"]

    async def release(self, daemon: str, name: str) -> None:
        await self._client(daemon).post("/release", {"name": name})

    async def restart(self, server: Server) -> None:
        try:
            await self._client(server.daemon).post("/restart", {"name": server.name})
        except RpcError as error:
            print(f"{server.daemon} did not restart {server.name}: {error}", file=sys.stderr, flush=True)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    def _client(self, url: str) -> AsyncClient:
        if url not in self._clients:
            self._clients[url] = AsyncClient(url, self._token)
        return self._clients[url]
