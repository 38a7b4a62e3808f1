"""Eight ranks that stay up for the whole suite: layouts are jobs to them, each in a process group of its own.

Owns processes and deadlines. They are forked from a server that has imported torch once. A job that does not answer in
time is a failure, and the next one gets fresh ranks.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core.parallel.mesh import Degrees, Mesh, build_mesh

RANKS = 8
DEADLINE_SECS = 60.0
Job = Callable[..., Any]  # job(mesh, **settings), a function of a module; what rank 0 returns is the answer


class RankError(AssertionError):
    """A job failed or hung on some rank."""


class Pool:
    """The ranks, as the test process sees them."""

    def __init__(self) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.parallel.jobs"])
        self._ranks: list[tuple[Any, Connection]] = []
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._jobs = 0

    def run(self, job: Job, degrees: Degrees, *, deadline: float = DEADLINE_SECS, **settings: Any) -> Any:
        """Runs the job on as many ranks as the degrees say."""
        self._start()
        self._jobs += 1
        store = self.folder / f"store-{self._jobs}"
        used = self._ranks[: degrees.world]
        for _, connection in used:
            connection.send((job, degrees, str(store), settings))
        ends = time.monotonic() + deadline
        answers: list[Any] = []
        for rank, (_, connection) in enumerate(used):
            if not connection.poll(max(0.0, ends - time.monotonic())):
                self.stop()
                raise RankError(f"rank {rank} of {degrees} gave no answer in {deadline:.0f} s")
            try:
                answers.append(connection.recv())
            except EOFError:
                answers.append((False, "died"))
        failed = [f"rank {rank}: {text}" for rank, (fine, text) in enumerate(answers) if not fine]
        if failed:
            self.stop()
            raise RankError("\n".join(failed))
        return torch.load(answers[0][1], weights_only=False)

    def stop(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            process.kill()
        for process, _ in self._ranks:
            process.join(10)
        self._ranks = []

    def _start(self) -> None:
        if self._ranks:
            return
        for rank in range(RANKS):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, rank, str(self.folder)), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


def _serve(connection: Connection, rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for number in range(1 << 30):
        try:
            job, degrees, store, settings = connection.recv()
        except (EOFError, OSError):
            return
        try:
            found = _in_group(job, degrees, store, rank, settings)
            answer = f"{folder}/answer-{number}.pt" if rank == 0 else ""
            if rank == 0:
                torch.save(found, answer)
            connection.send((True, answer))
        except BaseException:
            connection.send((False, traceback.format_exc()[-3000:]))


def _in_group(job: Job, degrees: Degrees, store: str, rank: int, settings: dict[str, Any]) -> Any:
    timeout = timedelta(seconds=DEADLINE_SECS / 2)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, degrees.world), rank=rank, world_size=degrees.world, timeout=timeout
    )
    try:
        mesh: Mesh = build_mesh(degrees, rank=rank, device=torch.device("cpu"))
        found = job(mesh, **settings)
        dist.barrier()
        return found
    finally:
        dist.destroy_process_group()
