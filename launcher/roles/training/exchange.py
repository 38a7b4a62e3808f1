"""What ranks tell each other on the host: objects, sums, and the wish to stop.

Owns the calls over the process group of the mesh; with one process and no group everything is its own answer.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.parallel.mesh import Mesh
from core.telemetry.phases import beat

TERM_GRACE_SECS, USR2_GRACE_SECS = 10.0, 60.0


class StopRequested(Exception):
    """A signal asked the run to stop; every rank raises it at the same place."""


class FetchError(Exception):
    """The rank that fetches for its team could not."""


def gather_over(group: dist.ProcessGroup | None, value: object) -> list[Any]:
    """Every rank's value, on every rank of a group; of one process, its own."""
    if group is None or group.size() == 1:
        return [value]
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, value, group=group)
    return found


class Exchange:
    """Collectives of plain values over all ranks."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def gather(self, value: object) -> list[Any]:
        """Every rank's value, on every rank."""
        return gather_over(self.mesh.world, value)

    def broadcast(self, value: object) -> Any:
        """Rank 0's value."""
        if self.mesh.world is None or self.mesh.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.mesh.world)
        return box[0]

    def share(self, fetch: Callable[[], Any]) -> Any:
        """What the first rank of each team fetches, on all its ranks; where that fails, it fails on all."""
        team = self.mesh.team.all
        if team is None:
            return fetch()
        box: list[Any] = [None]
        if self.mesh.leads:
            try:
                box = [(fetch(), None)]
            except Exception as error:
                box = [(None, error)]
        dist.broadcast_object_list(box, src=dist.get_global_rank(team, 0), group=team)
        value, failure = box[0]
        if failure is not None:
            raise FetchError(f"rank {dist.get_global_rank(team, 0)} could not fetch: {failure!r}") from failure
        return value

    def barrier(self) -> None:
        self.gather(None)

    def sum_samples(self, values: Tensor) -> Tensor:
        """Sum over the ranks that hold different samples."""
        return self._reduced(values, self.mesh.dp, dist.ReduceOp.SUM)

    def max_samples(self, values: Tensor) -> Tensor:
        return self._reduced(values, self.mesh.dp, dist.ReduceOp.MAX)

    def max_all(self, value: float) -> float:
        """The largest of all ranks' values."""
        return float(self._reduced(torch.tensor([value], dtype=torch.float64), self.mesh.world, dist.ReduceOp.MAX)[0])

    def _reduced(self, values: Tensor, group: dist.ProcessGroup | None, how: Any) -> Tensor:
        if group is not None and group.size() > 1:
            dist.all_reduce(values, op=how, group=group)
        return values


class StopFlags:
    """SIGTERM and SIGUSR2 as flags that all ranks read together, between micro-batches."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.grace = 0.0  # seconds that a save may take; 0 = nobody asked
        self._asked = 0

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGUSR2, self._note)

    def check(self) -> None:
        """Collective. Raises StopRequested on every rank once any of them was asked."""
        beat()
        asked = int(self.exchange.max_all(self._asked))
        if asked:
            self.grace = TERM_GRACE_SECS if asked == 2 else USR2_GRACE_SECS
            raise StopRequested("SIGTERM" if asked == 2 else "SIGUSR2")

    def _note(self, number: int, frame: object) -> None:
        self._asked = max(self._asked, 2 if number == signal.SIGTERM else 1)
