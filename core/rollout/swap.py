"""One version onto some servers: all paused, all loaded and verified, all resumed.

Owns the order of these steps; a server that fails one is taken out and restarted, the others go on without it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from core.inference.client import LoadRefusedError, ServerLostError, ServerRefusedError, version_number
from core.rollout.pool import ServerPool
from core.rollout.servers import Server, ServerState
from core.telemetry.phases import announce


@dataclass(frozen=True)
class Timing:
    """Seconds: of the loads, and from the first pause to the last resume."""

    load: float
    pause: float


async def swap(
    pool: ServerPool, servers: Sequence[Server], *, name: str, version: int, paths: Mapping[str, str]
) -> Timing:
    """`paths`: the verified directory on each daemon's node."""
    paused = time.monotonic()
    announce("pausing servers")
    servers = await _each(pool, servers, _pause, pool.pause_deadline)
    loading = time.monotonic()
    announce("loading servers")
    servers = await _each(pool, servers, lambda server: _load(server, name, paths[server.daemon]), pool.load_deadline)
    loaded = time.monotonic()
    for server in servers:
        server.served, server.served_name = version, name
    announce("resuming servers")
    await _each(pool, servers, _resume, pool.pause_deadline)
    pool.announce_serving()
    return Timing(loaded - loading, time.monotonic() - paused)


async def _each(
    pool: ServerPool, servers: Sequence[Server], step: Callable[[Server], Awaitable[None]], deadline: float
) -> list[Server]:
    """Those for which the step succeeded within its deadline; the others are out."""

    async def within(server: Server) -> None:
        try:
            async with asyncio.timeout(deadline):
                await step(server)
        except TimeoutError:
            raise ServerLostError(f"{server.url}: not done within {deadline:g} s while {server.state}") from None

    servers = [server for server in servers if server.state is not ServerState.OUT]
    results = await asyncio.gather(*(within(server) for server in servers), return_exceptions=True)
    for server, result in zip(servers, results, strict=True):
        if isinstance(result, ServerLostError | ServerRefusedError | LoadRefusedError):
            pool.take_out(server, str(result), restart=True)
        elif isinstance(result, BaseException) and server.state is not ServerState.OUT:
            raise result
    return [server for server in servers if server.state is not ServerState.OUT]


async def _pause(server: Server) -> None:
    await server.client.pause()
    server.move(ServerState.PAUSED)


async def _load(server: Server, name: str, path: str) -> None:
    server.move(ServerState.LOADING)
    await server.client.load(path, name)
    answered = str((await server.client.model_info()).get("weight_version"))
    if answered != name and not (answered.isdigit() and int(answered) == version_number(name)):
        raise LoadRefusedError(f"loaded {name} but answers with version {answered}")


async def _resume(server: Server) -> None:
    await server.client.resume()
    if server.capacity is None:
        with suppress(ServerLostError, ServerRefusedError):
            server.capacity = await server.client.capacity()
    server.move(ServerState.SERVING)
