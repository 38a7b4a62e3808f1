"""Children that decode pictures: real processes, stopped, killed and orphaned."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from core.data.image_pool import ImagePool
from core.data.images import ImageError, decode_png, load_image
from core.rl.trajectory import ImageRef
from tests.data.conftest import picture

LIMITS: dict[str, Any] = {"min_pixels": 3136, "max_pixels": 1003520}


def in_pool(work: Callable[[ImagePool], Awaitable[None]], *, workers: int = 1, deadline: float = 30.0) -> None:
    async def main() -> None:
        pool = ImagePool(workers, deadline=deadline)
        try:
            await asyncio.wait_for(work(pool), 60)
        finally:
            pids = pool.pids()
            await pool.close()
            assert not [pid for pid in pids if psutil.pid_exists(pid)]

    asyncio.run(main())


async def process(pool: ImagePool, source: object, root: Path = Path("/")) -> tuple[ImageRef, bytes]:
    return await pool.process(source, root=root, **LIMITS)


def test_a_child_gives_what_the_same_call_gives_here(tmp_path: Path) -> None:
    body = picture(333, 200)
    (tmp_path / "a.png").write_bytes(body)
    here = load_image(body, **LIMITS)

    async def work(pool: ImagePool) -> None:
        for source in (body, {"bytes": body, "path": "x"}, {"bytes": None, "path": "a.png"}, str(tmp_path / "a.png")):
            facts, png = await process(pool, source, tmp_path)
            assert facts == ImageRef(here.hash, (333, 200), here.resized, here.grid_thw)
            assert (decode_png(png) == here.pixels).all()
        assert len(pool.pids()) == 1
        assert pool.processed == 4

    in_pool(work)


def test_a_refused_picture_costs_no_child() -> None:
    async def work(pool: ImagePool) -> None:
        await process(pool, picture())
        pids = pool.pids()
        for bad in (b"junk", b"", 7, {"bytes": None, "path": None}, "/nowhere.png"):
            with pytest.raises(ImageError):
                await process(pool, bad)
        assert pool.pids() == pids
        assert pool.killed == 0

    in_pool(work)


def test_a_child_that_hangs_is_killed_at_the_deadline_and_replaced() -> None:
    async def work(pool: ImagePool) -> None:
        await process(pool, picture())
        pool.deadline = 0.5
        (pid,) = pool.pids()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ImageError, match=r"not decoded within 0.5 s"):
            await process(pool, picture())
        assert not psutil.pid_exists(pid)
        assert pool.killed == 1
        pool.deadline = 30.0
        await process(pool, picture())
        assert pool.pids() != [pid]

    in_pool(work)


def test_a_child_that_was_killed_costs_no_picture() -> None:
    async def work(pool: ImagePool) -> None:
        await process(pool, picture())
        os.kill(pool.pids()[0], signal.SIGKILL)
        facts, _ = await process(pool, picture())
        assert facts.original == (60, 80)

    in_pool(work)


def test_work_is_spread_over_as_many_children_as_allowed() -> None:
    async def work(pool: ImagePool) -> None:
        found = await asyncio.gather(*(process(pool, picture(seed=n)) for n in range(12)))
        assert len(pool.pids()) == 2
        assert len({facts.hash for facts, _ in found}) == 12

    in_pool(work, workers=2)


def test_a_caller_who_gives_up_leaves_no_child_behind_in_the_middle_of_an_answer() -> None:
    async def work(pool: ImagePool) -> None:
        await process(pool, picture())
        (pid,) = pool.pids()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process(pool, picture(seed=1)), 0.2)
        facts, _ = await process(pool, picture(100, 300))
        assert facts.original == (100, 300)

    in_pool(work)


def test_children_end_with_their_parent() -> None:
    code = (
        "import asyncio, sys, os, signal\n"
        "from pathlib import Path\n"
        "from core.data.image_pool import ImagePool\n"
        "async def main():\n"
        "    pool = ImagePool(1)\n"
        "    await pool.process(sys.stdin.buffer.read(), min_pixels=3136, max_pixels=99999, root=Path('/'))\n"
        "    print(pool.pids()[0], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], input=picture(), capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(done.stdout)).wait(timeout=20)
