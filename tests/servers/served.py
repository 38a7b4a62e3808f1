"""A real server of any backend as the contract suite asks it: started once, from this process, ended with it."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from core.config import Config
from core.data.images import Picture
from core.inference.backends import CLIENTS
from core.inference.client import Generation, Images, InferenceClient, Request
from core.inference.commands import Seat, launch
from core.inference.process import ServerProcess, Wanted
from launcher.servers.environment import python_of
from tests.embedded.harness import TOKEN, serving

CONTEXT = 2048
LIMIT = 4  # requests that a server runs at once
_START_SECS = 600.0
T = TypeVar("T")


class Loop:
    """An event loop in a thread, for tests that are not coroutines."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], timeout: float = 180) -> T:
        return self.submit(work).result(timeout)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


@dataclass
class Flight:
    """A request on its way: what has arrived, and how it ends."""

    request: Request
    partial: Generation
    future: Future[Generation]
    arrivals: int = 0

    def wait_for_tokens(self, count: int, secs: float = 120.0) -> None:
        deadline = time.monotonic() + secs
        while len(self.partial.output_ids) < count:
            assert not self.future.done(), self.future.exception() or self.future.result()
            assert time.monotonic() < deadline, f"{len(self.partial.output_ids)} of {count} tokens after {secs} s"
            time.sleep(0.005)

    def result(self, secs: float = 180.0) -> Generation:
        return self.future.result(secs)


@dataclass
class Served:
    backend: str
    url: str
    client: InferenceClient
    loop: Loop
    banned: tuple[int, ...]
    versions: dict[str, Path]
    on: str = ""
    process: ServerProcess | None = None
    precise: bool = False
    """float32 throughout; else bfloat16."""
    token: str = TOKEN
    extra: dict[str, Any] = field(default_factory=dict)

    def request(self, ids: Sequence[int], pictures: Sequence[Picture] = (), **sampling: Any) -> Request:
        params = {
            "temperature": 0.0,
            "max_new_tokens": 8,
            "ignore_eos": True,
            "logit_bias": {str(token): -1e9 for token in self.banned},
            **sampling,
        }
        return Request(uuid.uuid4().hex, list(ids), Images([picture.png() for picture in pictures]), params)

    def ask(self, ids: Sequence[int], pictures: Sequence[Picture] = (), **sampling: Any) -> Generation:
        return self.loop.run(self.client.generate_ids(self.request(ids, pictures, **sampling), stream=False))

    def start(self, ids: Sequence[int], pictures: Sequence[Picture] = (), **sampling: Any) -> Flight:
        """Streamed, so that the tokens can be watched."""
        request, partial = self.request(ids, pictures, **sampling), Generation()
        future = self.loop.submit(self.client.generate_ids(request, stream=True, partial=partial))
        return Flight(request, partial, future)

    def update(self, name: str) -> None:
        """Pause, load, resume, as the pool does; resumed whatever happens."""

        async def swap() -> None:
            await self.client.pause()
            try:
                await self.client.load(str(self.versions[name]), name)
            finally:
                await self.client.resume()

        self.loop.run(swap(), 300)
        self.on = name

    def be_on(self, name: str) -> None:
        if self.on != name:
            self.update(name)

    def version(self) -> str:
        return str(self.loop.run(self.client.model_info())["weight_version"])


@contextmanager
def started(
    backend: str, config: Config, model: Path, versions: dict[str, Path], banned: tuple[int, ...], log: Path
) -> Iterator[Served]:
    loop = Loop()
    try:
        if backend == "embedded":
            with serving(model, context_length=CONTEXT, max_running_requests=LIMIT) as remote:
                client = CLIENTS[backend](remote.url, TOKEN)
                yield Served(backend, remote.url, client, loop, banned, versions, precise=True)
                loop.run(client.close())
            return
        seat = Seat(python_of(backend, config, "cpu"), str(model), "", "cpu", 0)
        wanted = Wanted(backend, seat, versions_root(versions), TOKEN, ready_secs=_START_SECS)
        build: Callable[[Seat], Any] = lambda chosen: launch(backend, config, chosen)  # noqa: E731
        process = ServerProcess(wanted, build, log=log)
        try:
            url = loop.run(process.start(), _START_SECS + 60)
            client = CLIENTS[backend](url, TOKEN)
            yield Served(backend, url, client, loop, banned, versions, process=process)
            loop.run(client.close())
        finally:
            loop.run(process.stop(), 60)
    finally:
        loop.close()


def versions_root(versions: dict[str, Path]) -> Path:
    return next(iter(versions.values())).parent
