"""Clients of our own services: one synchronous (ranks, command line), one asynchronous (services). No proxies.

A call that may be repeated (GET, or POST with a request id given by the caller) is tried again when the connection
breaks, inside its deadline; anything else fails at once with RpcError.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from typing import Any

import aiohttp
import urllib3

from core.rpc.auth import REQUEST_ID, bearer
from core.rpc.errors import RpcError

Query = str | int | float | bool | None
RETRY_PAUSES = (0.05, 0.2, 0.5)


class Client:
    """Synchronous; safe to share between threads."""

    def __init__(self, url: str, token: str, *, timeout: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self._headers = bearer(token)
        self._timeout = timeout
        self._pool = urllib3.PoolManager(num_pools=2, maxsize=8, retries=False)

    def get(self, path: str, *, timeout: float | None = None, **query: Query) -> dict[str, Any]:
        return _object(self.get_bytes(path, timeout=timeout, **query), self.url + path)

    def get_bytes(self, path: str, *, timeout: float | None = None, **query: Query) -> bytes:
        return self._call("GET", path, timeout, fields=_fields(query))

    def post(
        self, path: str, body: dict[str, Any], *, timeout: float | None = None, request_id: str | None = None
    ) -> dict[str, Any]:
        headers = {REQUEST_ID: request_id or uuid.uuid4().hex, "Content-Type": "application/json"}
        data = json.dumps(body).encode()
        reply = self._call("POST", path, timeout, body=data, headers=headers, repeat=request_id is not None)
        return _object(reply, self.url + path)

    def close(self) -> None:
        self._pool.clear()

    def _call(
        self,
        method: str,
        path: str,
        timeout: float | None,
        *,
        fields: dict[str, str] | None = None,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        repeat: bool = True,
    ) -> bytes:
        url = self.url + path
        limit = self._timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        all_headers = {**self._headers, **(headers or {})}
        pauses = iter(RETRY_PAUSES if repeat else ())
        while True:
            left = max(0.001, deadline - time.monotonic())
            try:
                reply = self._pool.request(
                    method, url, fields=fields, body=body, headers=all_headers, timeout=urllib3.Timeout(total=left)
                )
            except urllib3.exceptions.HTTPError as error:
                refused = isinstance(error, urllib3.exceptions.NewConnectionError)  # urllib3 calls it a timeout
                if isinstance(error, urllib3.exceptions.TimeoutError) and not refused:
                    raise RpcError(0, f"no answer within {limit:g} s", url) from None
                pause = next(pauses, None)
                if pause is None or time.monotonic() + pause >= deadline:
                    raise RpcError(0, f"cannot be reached: {_reason(error)}", url) from None
                time.sleep(pause)
                continue
            return _checked(reply.status, reply.data, url)


class AsyncClient:
    """Asynchronous; belongs to the event loop that first uses it."""

    def __init__(self, url: str, token: str, *, timeout: float = 30.0) -> None:
        self.url = url.rstrip("/")
        self._headers = bearer(token)
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str, *, timeout: float | None = None, **query: Query) -> dict[str, Any]:
        return _object(await self.get_bytes(path, timeout=timeout, **query), self.url + path)

    async def get_bytes(self, path: str, *, timeout: float | None = None, **query: Query) -> bytes:
        return await self._call("GET", path, timeout, params=_fields(query))

    async def post(
        self, path: str, body: dict[str, Any], *, timeout: float | None = None, request_id: str | None = None
    ) -> dict[str, Any]:
        headers = {REQUEST_ID: request_id or uuid.uuid4().hex, "Content-Type": "application/json"}
        data = json.dumps(body).encode()
        reply = await self._call("POST", path, timeout, data=data, headers=headers, repeat=request_id is not None)
        return _object(reply, self.url + path)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(
        self, method: str, path: str, timeout: float | None, *, repeat: bool = True, **request: Any
    ) -> bytes:
        url = self.url + path
        limit = self._timeout if timeout is None else timeout
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        pauses = iter(RETRY_PAUSES if repeat else ())
        try:
            async with asyncio.timeout(limit):
                while True:
                    try:
                        return await self._once(method, url, request)
                    except (aiohttp.ClientError, ConnectionError) as error:
                        pause = next(pauses, None)
                        if pause is None:
                            raise RpcError(0, f"cannot be reached: {_reason(error)}", url) from None
                        await asyncio.sleep(pause)
        except TimeoutError:
            raise RpcError(0, f"no answer within {limit:g} s", url) from None

    async def _once(self, method: str, url: str, request: dict[str, Any]) -> bytes:
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.request(method, url, timeout=timeout, **request) as reply:
            return _checked(reply.status, await reply.read(), url)


def _fields(query: dict[str, Query]) -> dict[str, str]:
    def text(value: Query) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)

    return {key: text(value) for key, value in query.items() if value is not None}


def _checked(status: int, data: bytes, url: str) -> bytes:
    if status == 200:
        return data
    try:
        message = str(json.loads(data)["error"])
    except (ValueError, KeyError, TypeError):
        message = data[:500].decode("utf-8", "replace") or f"HTTP {status}"
    raise RpcError(status, message, url)


def _object(data: bytes, url: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError:
        raise RpcError(0, f"answered {len(data)} bytes that are not JSON", url) from None
    if not isinstance(value, dict):
        raise RpcError(0, f"answered a {type(value).__name__}, not an object", url)
    return value


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
