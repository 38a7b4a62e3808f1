"""Ranks that compute one step under every layout in turn, and hold each against one process.

Owns the processes and what counts as too far; what is compared is core.engine.certificate. Needs no configuration
schema, so that a bench can use it as it is.

In float32 (and wider) every distance must stay within `tolerance`. In half precision the reference is float32, and a
layout may be at most FARTHER times as far from it as one process in half precision is.
"""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.engine.certificate import Distances, Seen, Work, compare, gradients, step
from core.engine.train_engine import TrainEngine
from core.parallel.mesh import Degrees, build_mesh, join
from models.archon.qwen2.infra.parallelize import master_dtype, parallelize
from models.archon.registry import family_of

FARTHER = 1.25
SCALARS = 1e-3  # loss and norm are single numbers: half precision may hit them by chance
GROUP_SECS = 300.0
Fill = Callable[[torch.nn.Module, Any], None]  # puts weights into a sharded model, given its arguments


class VerificationError(Exception):
    """A layout could not be computed at all."""


@dataclass(frozen=True)
class Layout:
    name: str
    degrees: Degrees
    cp_style: str = "ulysses"


@dataclass(frozen=True)
class Spec:
    """What is verified. `actor` has the attributes of the section that parallelize reads."""

    model: Path
    actor: SimpleNamespace
    work: Work
    layouts: tuple[Layout, ...]
    device: str = "cpu"
    tolerance: float = 1e-5
    fill: Fill | None = None  # None: the weights of `model`


@dataclass(frozen=True)
class Verdict:
    layout: str
    distances: Distances
    secs: float
    too_far: tuple[str, ...]  # names of what is, none of them for the one process that half precision is held against


def verify(spec: Spec) -> list[Verdict]:
    """Runs every layout; raises VerificationError where one cannot be computed."""
    folder = Path(tempfile.mkdtemp(prefix="verify-"))
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    count = max(layout.degrees.world for layout in spec.layouts)
    ranks = [context.Process(target=_run, args=(spec, rank, str(folder))) for rank in range(count)]
    for rank in ranks:
        rank.start()
    try:
        while any(rank.is_alive() for rank in ranks):
            if failed := [i for i, rank in enumerate(ranks) if rank.exitcode not in (None, 0)]:
                time.sleep(1.0)  # the others' reasons may be the better ones
                texts = [path.read_text() for path in sorted(folder.glob("error-*"))]
                died = [f"rank {i} ended with {ranks[i].exitcode}" for i in failed]
                raise VerificationError("\n".join([*texts, *died]))
            ranks[0].join(0.2)
        if failed := [i for i, rank in enumerate(ranks) if rank.exitcode]:
            raise VerificationError("\n".join(path.read_text() for path in sorted(folder.glob("error-*"))))
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    rows = json.loads((folder / "verdicts.json").read_text())
    return [Verdict(row["layout"], Distances(**row["distances"]), row["secs"], tuple(row["too_far"])) for row in rows]


def judge(spec: Spec, found: Distances, yardstick: Distances | None) -> tuple[str, ...]:
    """Names of what is too far from the reference."""
    if yardstick is None:
        far = {name: getattr(found, name) for name in ("loss", "grad_norm", "logp", "entropy")} | found.named
        return tuple(f"{name} {value:.1e}" for name, value in far.items() if not value <= spec.tolerance)
    limits = {name: FARTHER * getattr(yardstick, name) for name in ("logp_rms", "entropy_rms", "gradients_rms")}
    limits |= {name: max(SCALARS, FARTHER * getattr(yardstick, name)) for name in ("loss", "grad_norm")}
    return tuple(
        f"{name} {getattr(found, name):.2e} (at most {limit:.2e})"
        for name, limit in limits.items()
        if not getattr(found, name) <= limit
    )


def _run(spec: Spec, rank: int, folder: str) -> None:
    # gathering a gradient that is cut twice takes two steps, and says so on every rank
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    try:
        torch.set_num_threads(1)
        verdicts = _Rank(spec, rank, Path(folder)).verdicts()
        if rank == 0:
            Path(folder, "verdicts.json").write_text(json.dumps([asdict(verdict) for verdict in verdicts]))
    except BaseException:
        Path(folder, f"error-{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        os._exit(1)  # leaving a broken group in order would wait for the others


class _Rank:
    """One rank over all layouts; rank 0 keeps the reference."""

    def __init__(self, spec: Spec, rank: int, folder: Path) -> None:
        self.spec, self.rank, self.folder = spec, rank, folder
        self.half = getattr(torch, spec.actor.dtype).itemsize < 4
        self.seen: Seen | None = None
        self.gradients: dict[str, Tensor] = {}
        self.groups = 0

    def verdicts(self) -> list[Verdict]:
        found: list[Verdict] = []
        one = Layout("one process", Degrees())
        plain = _with(self.spec.actor, archon=_with(self.spec.actor.archon, enable_compile=False))
        exact = replace(self.spec, actor=_with(plain, dtype="float32" if self.half else plain.dtype))
        self._layout(exact, one, None, keep=True)
        yardstick = None
        if self.half:
            verdict = self._layout(self.spec, replace(one, name=f"one process, {self.spec.actor.dtype}"), None)
            yardstick = verdict.distances if verdict else None
            found += [replace(verdict, too_far=())] if verdict else []
        for layout in self.spec.layouts:
            verdict = self._layout(self.spec, layout, yardstick)
            found += [verdict] if verdict else []
        return found

    def _layout(self, spec: Spec, layout: Layout, yardstick: Distances | None, *, keep: bool = False) -> Verdict | None:
        """Collective among the layout's ranks; a verdict on rank 0."""
        self.groups += 1
        if self.rank >= layout.degrees.world:
            return None
        store = dist.FileStore(str(self.folder / f"store-{self.groups}"), layout.degrees.world)
        verdict = self._judged(rank_engine(spec, layout, self.rank, store), spec, layout, yardstick, keep=keep)
        dist.destroy_process_group()
        # NCCL takes memory of its own for the next layout, which torch must have given back
        gc.collect()
        if spec.device == "cuda":
            torch.cuda.empty_cache()
        return verdict

    def _judged(
        self, engine: TrainEngine, spec: Spec, layout: Layout, yardstick: Distances | None, *, keep: bool
    ) -> Verdict | None:
        started = time.perf_counter()
        seen = step(engine, spec.work)
        secs = time.perf_counter() - started
        if keep:
            self.seen = seen
            self.gradients = {name: tensor.clone() for name, tensor in gradients(engine)}
            return None
        found = compare(seen, self.seen or seen, gradients(engine), self.gradients)
        return Verdict(layout.name, found, secs, judge(spec, found, yardstick)) if self.rank == 0 else None


def rank_engine(spec: Spec, layout: Layout, rank: int, store: dist.Store) -> TrainEngine:
    """Joins the ranks of the layout and builds its engine, without an optimizer; collective."""
    if spec.device == "cuda":
        torch.cuda.set_device(rank)
    device = torch.device(spec.device, rank) if spec.device == "cuda" else torch.device("cpu")
    join(store, rank=rank, world=layout.degrees.world, device=device, timeout=GROUP_SECS)
    mesh = build_mesh(layout.degrees, rank=rank, device=device)
    compute = getattr(torch, spec.actor.dtype)
    family = family_of(spec.model)
    args = family.args.from_pretrained(spec.model, dtype=master_dtype(compute))
    model = family.model.on_meta(args, team=mesh.team, cp_style=layout.cp_style)
    parallelize(model, mesh, spec.actor)
    model.to_empty(device=mesh.device)
    model.tie()
    if spec.fill is None:
        family.adapter(args).load_into(model, args.path)
    else:
        spec.fill(model, args)
    return TrainEngine(model, mesh, None, compute_dtype=compute)


def _with(section: SimpleNamespace, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(section), **changes})


def lines(verdicts: list[Verdict]) -> Iterator[str]:
    """The table, as the command prints it."""
    yield f"{'layout':24} {'loss':>8} {'logprobs':>8} {'entropy':>8} {'norm':>8} {'gradients':>9} {'worst':>8}  secs"
    for each in verdicts:
        d = each.distances
        numbers = (
            f"{d.loss:8.1e} {d.logp:8.1e} {d.entropy:8.1e} {d.grad_norm:8.1e} {d.gradients_rms:9.1e} {d.worst:8.1e}"
        )
        yield f"{each.layout:24} {numbers}  {each.secs:.1f}  {'too far' if each.too_far else 'ok'}"
        yield from (f"    {name}" for name in each.too_far[:8])
