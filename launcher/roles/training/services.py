"""The other processes of the run, as the trainer finds them: the registry of its daemon, and a client of each service.

Owns the waiting: a service that is being restarted (on another port) is looked up again until `patience` is over.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.data.images import decode_png
from core.rpc.client import Client
from core.rpc.errors import RpcError
from core.telemetry.phases import beat

LOOK_SECS = 0.1


class ServiceLostError(Exception):
    """A service of the run could not be reached for longer than the run waits."""


class Services:
    """Calls to services by name; safe to share between threads."""

    def __init__(self, daemon: str, token: str, *, patience: float) -> None:
        self.token = token
        self.patience = patience
        self._daemon = Client(daemon, token)
        self._clients: dict[str, Client] = {}

    def get(self, name: str, path: str, *, timeout: float = 30.0, **query: Any) -> dict[str, Any]:
        return self._call(name, path, lambda client: client.get(path, timeout=timeout, **query))

    def get_bytes(self, name: str, path: str, *, timeout: float = 60.0, **query: Any) -> bytes:
        return self._call(name, path, lambda client: client.get_bytes(path, timeout=timeout, **query))

    def post(self, name: str, path: str, body: dict[str, Any], *, request_id: str) -> dict[str, Any]:
        return self._call(name, path, lambda client: client.post(path, body, request_id=request_id))

    def _call(self, name: str, path: str, call: Any) -> Any:
        """Calls, and when nobody answers looks the service up again."""
        deadline = time.monotonic() + self.patience
        while True:
            try:
                return call(self._client(name, deadline))
            except RpcError as error:
                # 0: not reached; 503: reached, and not ready to answer
                if error.status not in (0, 503):
                    raise
                if time.monotonic() >= deadline:
                    raise ServiceLostError(f"{name} did not answer {path} for {self.patience:g} s: {error}") from error
                self._clients.pop(name, None)
                beat()
                time.sleep(LOOK_SECS)

    def _client(self, name: str, deadline: float) -> Client:
        while name not in self._clients:
            url = self._daemon.get("/registry").get("services", {}).get(name)
            if url:
                self._clients[name] = Client(url, self.token)
            elif time.monotonic() >= deadline:
                raise ServiceLostError(f"{name} was not registered within {self.patience:g} s; see its log")
            else:
                beat()
                time.sleep(LOOK_SECS)
        return self._clients[name]


class Pixels:
    """Decoded images by content hash from the data service; the least used go beyond `limit_bytes`. Thread-safe."""

    def __init__(self, services: Services, *, limit_bytes: int = 512 << 20, threads: int = 4) -> None:
        self._services = services
        self._limit = limit_bytes
        self._kept: OrderedDict[str, NDArray[np.uint8]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="pixels")

    def get(self, names: Iterable[str]) -> dict[str, NDArray[np.uint8]]:
        """Pixels of every name."""
        wanted = dict.fromkeys(names)
        with self._lock:
            found = {name: self._kept[name] for name in wanted if name in self._kept}
            for name in found:
                self._kept.move_to_end(name)
        missing = [name for name in wanted if name not in found]
        fetched = dict(zip(missing, self._pool.map(self._fetch, missing), strict=True))
        with self._lock:
            for name, pixels in fetched.items():
                self._bytes += pixels.nbytes if name not in self._kept else 0
                self._kept[name] = pixels
            while self._bytes > self._limit:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return found | fetched

    def _fetch(self, name: str) -> NDArray[np.uint8]:
        return decode_png(self._services.get_bytes("data", f"/images/{name}"))
