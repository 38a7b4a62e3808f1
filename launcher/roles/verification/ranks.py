"""Ranks that compute one step under a layout, and hold it against one process; layout after layout.

Owns the processes and what counts as too far; what is compared is core.engine.certificate. Needs no configuration
schema, so that a bench can use it as it is.

In float32 (and wider) every distance must stay within `tolerance`. In half precision the reference is float32, and a
layout may be at most FARTHER times as far from it as one process in half precision is. The gradient norm is judged
otherwise there: how near half precision comes to one number is chance (|‖a‖−‖b‖| may be anything up to ‖a−b‖, which is
judged), so it must be the norm of the layout's own gradients, gathered whole.
"""

from __future__ import annotations

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

from core.engine.certificate import Distances, Seen, Work, compare, gradients, step
from core.engine.train_engine import TrainEngine
from core.parallel.mesh import Degrees, build_mesh, join
from models.archon.qwen2.infra.parallelize import master_dtype, parallelize
from models.archon.registry import family_of

FARTHER = 1.25
LOSS = 1e-3  # a single number: one process in half precision may come nearer than this by chance
NORM_GAP = 1e-4
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
    """Runs every layout in ranks of its own; raises VerificationError where one cannot be computed.

    Ranks are not used twice: NCCL failed to split a group in a process that had had one before (seen, torch 2.11).
    """
    with tempfile.TemporaryDirectory(prefix="verify-") as directory:
        folder = Path(directory)
        one = Layout("one process", Degrees())
        half = getattr(torch, spec.actor.dtype).itemsize < 4
        plain = _with(spec.actor, archon=_with(spec.actor.archon, enable_compile=False))
        exact = replace(spec, actor=_with(plain, dtype="float32" if half else plain.dtype))
        _compute(_Job(exact, one, folder, 0, keep=True))
        layouts = [*([replace(one, name=f"one process, {spec.actor.dtype}")] if half else []), *spec.layouts]
        found: list[Verdict] = []
        for number, layout in enumerate(layouts, start=1):
            distances, secs = _compute(_Job(spec, layout, folder, number))
            yardstick = found[0].distances if found and half else None
            far = () if half and not found else judge(spec, distances, yardstick)
            found.append(Verdict(layout.name, distances, secs, far))
        return found


@dataclass(frozen=True)
class _Job:
    """One layout to compute; `keep`: it is the reference, which the others are held against."""

    spec: Spec
    layout: Layout
    folder: Path
    number: int
    keep: bool = False

    @property
    def reference(self) -> Path:
        return self.folder / "reference.pt"

    @property
    def result(self) -> Path:
        return self.folder / f"result-{self.number}.json"

    def error(self, rank: int) -> Path:
        return self.folder / f"error-{self.number}-{rank}"


def _compute(job: _Job) -> tuple[Distances, float]:
    """Distances of a layout from the reference (all zero for the reference itself), and the seconds of its step."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ranks = [context.Process(target=_run, args=(job, rank)) for rank in range(job.layout.degrees.world)]
    for process in ranks:
        process.start()
    try:
        while any(process.is_alive() for process in ranks):
            if any(process.exitcode for process in ranks):
                time.sleep(1.0)  # the others' reasons may be the better ones
                break
            ranks[0].join(0.2)
        failed = [i for i, process in enumerate(ranks) if process.exitcode]
        if failed:
            texts = [job.error(i).read_text() for i in range(len(ranks)) if job.error(i).exists()]
            died = [f"{job.layout.name}: rank {i} ended with {ranks[i].exitcode}" for i in failed]
            raise VerificationError("\n".join([*texts, *died]))
    finally:
        for process in ranks:
            process.kill()
            process.join()
    row = json.loads(job.result.read_text())
    return Distances(**row["distances"]), row["secs"]


def judge(spec: Spec, found: Distances, yardstick: Distances | None) -> tuple[str, ...]:
    """Names of what is too far from the reference."""
    if yardstick is None:
        far = {name: getattr(found, name) for name in ("loss", "grad_norm", "logp", "entropy")} | found.named
        return tuple(f"{name} {value:.1e}" for name, value in far.items() if not value <= spec.tolerance)
    limits = {name: FARTHER * getattr(yardstick, name) for name in ("logp_rms", "entropy_rms", "gradients_rms")}
    limits |= {"loss": max(LOSS, FARTHER * yardstick.loss), "norm_gap": NORM_GAP}
    return tuple(
        f"{name} {getattr(found, name):.2e} (at most {limit:.2e})"
        for name, limit in limits.items()
        if not getattr(found, name) <= limit
    )


def _run(job: _Job, rank: int) -> None:
    # gathering a gradient that is cut twice takes two steps, and says so on every rank
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(job.folder / f"store-{job.number}"), job.layout.degrees.world)
        engine = rank_engine(job.spec, job.layout, rank, store)
        started = time.perf_counter()
        seen = step(engine, job.spec.work)
        secs = time.perf_counter() - started
        distances = _kept(job, engine, seen) if job.keep else _compared(job, engine, seen, rank)
        if rank == 0:
            job.result.write_text(json.dumps({"distances": asdict(distances), "secs": secs}))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        job.error(rank).write_text(f"{job.layout.name}: rank {rank}: {traceback.format_exc()}")
        os._exit(1)  # leaving a broken group in order would wait for the others


def _kept(job: _Job, engine: TrainEngine, seen: Seen) -> Distances:
    torch.save({"seen": asdict(seen), "gradients": {k: v.cpu() for k, v in gradients(engine)}}, job.reference)
    return Distances(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def _compared(job: _Job, engine: TrainEngine, seen: Seen, rank: int) -> Distances:
    """Collective: every rank gathers the gradients, rank 0 compares them."""
    kept = torch.load(job.reference, mmap=True, weights_only=True)
    return compare(seen, Seen(**kept["seen"]), gradients(engine), kept["gradients"] if rank == 0 else {})


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
    head = f"{'layout':24} {'loss':>8} {'logprobs':>8} {'entropy':>8} {'norm':>8}"
    yield f"{head} {'own norm':>8} {'gradients':>9} {'worst':>8}  secs"
    for each in verdicts:
        d = each.distances
        scores = f"{d.loss:8.1e} {d.logp:8.1e} {d.entropy:8.1e} {d.grad_norm:8.1e}"
        numbers = f"{scores} {d.norm_gap:8.1e} {d.gradients_rms:9.1e} {d.worst:8.1e}"
        yield f"{each.layout:24} {numbers}  {each.secs:.1f}  {'too far' if each.too_far else 'ok'}"
        yield from (f"    {name}" for name in each.too_far[:8])
