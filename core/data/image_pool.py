"""Children that decode pictures, each with a deadline after which it is killed and replaced.

Owns the children and the queue for them; what they do is core.data.image_worker. Lives on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.data.image_worker import frame
from core.data.images import MAX_SOURCE_BYTES, ImageError
from core.rl.trajectory import ImageRef

_REPOSITORY = Path(__file__).parents[2]


class _ChildDied(Exception):
    """A child ended before it answered; the message says how."""


class ImagePool:
    """Up to `workers` children, started when there is work."""

    def __init__(self, workers: int, *, deadline: float = 60.0) -> None:
        self.workers = workers
        self.deadline = deadline
        self.processed = 0
        self.killed = 0
        self._free: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        self._slots = asyncio.Semaphore(workers)

    async def process(self, source: object, *, min_pixels: int, max_pixels: int, root: Path) -> tuple[ImageRef, bytes]:
        """Facts and PNG of a picture at its final size. Raises ImageError, also for one that hangs or kills a child."""
        request = _request(source, min_pixels, max_pixels, root)
        async with self._slots:
            try:
                header, body = await self._ask(request)
            except _ChildDied:
                # It may have been ended from outside, idle or at work; a picture that ends two is to blame.
                try:
                    header, body = await self._ask(request)
                except _ChildDied as error:
                    raise ImageError(f"decoding it ended its process twice ({error})") from None
        self.processed += 1
        if "error" in header:
            raise ImageError(header["error"])
        facts = ImageRef(
            hash=header["hash"],
            original=tuple(header["original"]),
            resized=tuple(header["resized"]),
            grid_thw=tuple(header["grid_thw"]),
        )
        return facts, body

    async def _ask(self, request: bytes) -> tuple[dict[str, Any], bytes]:
        child = self._free.pop() if self._free else await self._start()
        try:
            answer = await asyncio.wait_for(_exchange(child, request), self.deadline)
        except TimeoutError:
            self.killed += 1
            raise ImageError(f"not decoded within {self.deadline:g} s; its process was killed") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            await child.wait()
            code = child.returncode or 0
            raise _ChildDied(signal.Signals(-code).name if code < 0 else f"exit code {code}") from None
        else:
            self._free.append(child)
            return answer
        finally:
            if child not in self._free:
                await self._end(child)

    def pids(self) -> list[int]:
        return sorted(child.pid for child in self._all)

    async def close(self) -> None:
        """Ends every child."""
        self._free.clear()
        for child in list(self._all):
            await self._end(child)

    async def _start(self) -> asyncio.subprocess.Process:
        path = os.pathsep.join(filter(None, (str(_REPOSITORY), os.environ.get("PYTHONPATH"))))
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "core.data.image_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._all.add(child)
        return child

    async def _end(self, child: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
        self._all.discard(child)


def _request(source: object, min_pixels: int, max_pixels: int, root: Path) -> bytes:
    if isinstance(source, Mapping):
        body, path = source.get("bytes"), source.get("path")
        if body is None and path is None:
            raise ImageError("no picture: both bytes and path are empty")
        source = body if body is not None else path
    if isinstance(source, str | Path):
        body, path = b"", str(source)
    elif isinstance(source, bytes | bytearray | memoryview):
        body, path = bytes(source), None
    else:
        raise ImageError(f"a picture is bytes, a path or a mapping with bytes or path, not {type(source).__name__}")
    if len(body) > MAX_SOURCE_BYTES:
        raise ImageError(f"the file has {len(body):,} bytes, more than {MAX_SOURCE_BYTES:,}")
    limits = {"min_pixels": min_pixels, "max_pixels": max_pixels}
    return frame({"path": path, "root": str(root)} | limits, body)


async def _exchange(child: asyncio.subprocess.Process, request: bytes) -> tuple[dict[str, Any], bytes]:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(request)
    await child.stdin.drain()
    length = int.from_bytes(await child.stdout.readexactly(4), "little")
    header = json.loads(await child.stdout.readexactly(length))
    return header, await child.stdout.readexactly(header["size"])
