"""Prompts and images from the data service, a little ahead of their use.

Owns the way to the data service (found anew when it was restarted) and the place in the data; which prompts are started
when is the collector's business.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import Any

from core.rpc.client import AsyncClient
from core.rpc.errors import RpcError

_RETRY_SECS = 0.3
_IMAGES_KEPT = 64


class DataService:
    """`locate` gives its present URL, or None while it has none."""

    def __init__(self, locate: Callable[[], Awaitable[str | None]], token: str, *, patience: float = 300.0) -> None:
        self._locate = locate
        self._token = token
        self._patience = patience
        self._client: AsyncClient | None = None
        self._retired: list[AsyncClient] = []
        self._images: OrderedDict[str, asyncio.Task[bytes]] = OrderedDict()

    async def get(self, path: str, **query: Any) -> dict[str, Any]:
        return await self._call(lambda client: client.get(path, timeout=120.0, **query))

    async def image(self, name: str) -> bytes:
        """PNG of an image; asked for once, however many want it at the same time."""
        if name not in self._images:
            path = f"/images/{name}"
            self._images[name] = asyncio.ensure_future(self._call(lambda client: client.get_bytes(path, timeout=120.0)))
            while len(self._images) > _IMAGES_KEPT:
                self._images.popitem(last=False)
        try:
            return await asyncio.shield(self._images[name])
        except Exception:
            self._images.pop(name, None)
            raise

    async def close(self) -> None:
        for client in [*self._retired, *([self._client] if self._client is not None else [])]:
            await client.close()

    async def _call(self, call: Callable[[AsyncClient], Awaitable[Any]]) -> Any:
        """Repeats what found nobody: the data service is restarted by its daemon and answers the same again."""
        deadline = time.monotonic() + self._patience
        while True:
            client: AsyncClient | None = None
            try:
                client = await self._connected()
                return await call(client)
            except RpcError as error:
                if not error.unreachable or time.monotonic() > deadline:
                    raise
            if client is not None and client is self._client:
                # not closed yet: other calls may still be using it, and must fail as unreachable, too
                self._retired.append(client)
                self._client = None
            await asyncio.sleep(_RETRY_SECS)

    async def _connected(self) -> AsyncClient:
        if self._client is None:
            url = await self._locate()
            if url is None:
                raise RpcError(0, "the data service is not registered", "data")
            self._client = AsyncClient(url, self._token)
        return self._client


class PromptSource:
    """Rows of a split in their order from a cursor on; None for every call behind the last one."""

    def __init__(self, data: DataService, split: str, cursor: dict[str, Any] | None, *, ahead: int) -> None:
        self._data = data
        self._split = split
        self._cursor = cursor
        self._ahead = ahead
        self._waiting: deque[tuple[dict[str, Any], dict[str, Any]]] = deque()
        self._fetching: asyncio.Task[None] | None = None

    async def next(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """A prompt as the data service gives it, and the cursor behind it; None behind the last."""
        while not self._waiting:
            if self._cursor is None and self._fetching is None:
                return None
            await self._fetched()
        if self._fetching is not None and self._fetching.done():
            await self._fetched()
        if len(self._waiting) <= self._ahead // 2 and self._cursor is not None and self._fetching is None:
            self._fetching = asyncio.ensure_future(self._fetch())
        return self._waiting.popleft()

    def exhausted(self) -> bool:
        return self._cursor is None and not self._waiting and self._fetching is None

    async def _fetched(self) -> None:
        if self._fetching is None:
            self._fetching = asyncio.ensure_future(self._fetch())
        try:
            await self._fetching
        finally:
            self._fetching = None

    async def _fetch(self) -> None:
        assert self._cursor is not None
        cursor = self._cursor
        answer = await self._data.get(
            "/prompts", split=self._split, epoch=cursor["epoch"], position=cursor["position"], n=self._ahead
        )
        prompts, following = answer["prompts"], answer["next"]
        for i, prompt in enumerate(prompts):
            # behind the last of all, too: a run that is resumed for more epochs goes on there
            behind = following or {"epoch": prompt["epoch"], "position": prompt["position"] + 1}
            if i + 1 < len(prompts):
                behind = {"epoch": prompts[i + 1]["epoch"], "position": prompts[i + 1]["position"]}
            self._waiting.append((prompt, behind))
        self._cursor = following
