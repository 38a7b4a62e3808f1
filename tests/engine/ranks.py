"""A gloo rank that runs the jobs of test_ranks and saves what each gave; started by conftest as a real process.

python -m tests.engine.ranks OUT CHECKPOINT RANK WORLD
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core.engine import checkpoint
from core.engine.microbatch import Limits
from core.parallel.mesh import Degrees, Mesh, build_mesh, join
from tests.engine.scene import ADAM, Batch, make_batch, make_engine, policy_step, whole

# name: (engine, limits, images)
STEPS: dict[str, tuple[dict[str, Any], Limits, str]] = {
    "one unit": ({}, Limits(120, 480), "some"),
    "unit a layer": ({"one_unit": False}, Limits(120, 480), "some"),
    "images on one rank": ({"one_unit": False}, Limits(120, 480), "one"),
    "no images": ({"one_unit": False}, Limits(120, 480), "none"),
    "checkpointing full": ({"one_unit": False, "checkpointing": "full"}, Limits(60, 240), "some"),
    "checkpointing selective": ({"one_unit": False, "checkpointing": "selective"}, Limits(60, 240), "some"),
    "frozen tower": ({"one_unit": False, "freeze_vision": True}, Limits(60, 240), "some"),
}
ADAM_STEPS = 100


def small_batch(path: Path) -> Batch:
    """Five samples of two groups: enough for many steps."""
    batch = make_batch(path)
    return replace(batch, documents=batch.documents[:5])


def run_step(path: Path, mesh: Mesh, name: str) -> dict[str, Any]:
    settings, limits, images = STEPS[name]
    engine = make_engine(path, mesh, **settings)
    batch = make_batch(path, images=images)
    before = whole(engine)
    step = policy_step(engine, batch, limits)
    after = whole(engine)
    return {
        "loss": step.update.loss,
        "grad_norm": step.update.grad_norm,
        "gradients": {name: before[name] - after[name] for name in before},
        "logp": step.logp,
        "prox_diff_max": step.counts.prox_diff_max,
    }


def run_adam(path: Path, mesh: Mesh) -> dict[str, Any]:
    """A hundred updates in bf16 compute over float32 masters; how the masters moved."""
    engine = make_engine(path, mesh, dtype="bfloat16", optimizer=ADAM)
    batch = small_batch(path)
    before = whole(engine)
    for _ in range(ADAM_STEPS):
        policy_step(engine, batch, lr=ADAM.lr, recompute=False)
    return {name: after - before[name] for name, after in whole(engine).items()}


def run_publish(path: Path, mesh: Mesh) -> dict[str, Any]:
    found = {}
    for one_unit in (True, False):
        for dtype in ("float32", "bfloat16"):
            engine = make_engine(path, mesh, dtype=dtype, one_unit=one_unit, optimizer=ADAM)
            policy_step(engine, make_batch(path), lr=1e-3)
            first = engine.publish_share()
            masters = whole(engine)
            policy_step(engine, make_batch(path), lr=1e-3)  # sharding is as it was: training goes on
            found[f"{one_unit} {dtype}"] = (first, masters)
    return found


def run_checkpoint(path: Path, mesh: Mesh, out: Path) -> dict[str, Any]:
    """Two steps, a save, a step; then the same step again from the checkpoint."""

    def gather(value: object) -> list[Any]:
        values: list[Any] = [None] * mesh.size
        dist.all_gather_object(values, value)
        return values

    batch = make_batch(path)
    engine = make_engine(path, mesh, optimizer=ADAM, one_unit=False)
    for _ in range(2):
        policy_step(engine, batch, lr=1e-3)
    checkpoint.save(out / "checkpoints", 2, engine, {"data": {"place": 5}}, keep=2, gather=gather)
    saved = {**whole(engine), **{n: t.full_tensor().clone() for n, t in engine.optimizer.state().items()}}
    policy_step(engine, batch, lr=1e-3)
    resumed = make_engine(path, mesh, optimizer=ADAM, one_unit=False)
    loaded = checkpoint.load(out / "checkpoints", resumed, gather=gather)
    policy_step(resumed, batch, lr=1e-3)
    return {"saved": saved, "went on": whole(engine), "resumed": whole(resumed), "state": loaded.state}


def main() -> None:
    out, path, rank, world = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    store = dist.FileStore(str(out / "store"), world)
    device = torch.device("cpu")
    join(store, rank=rank, world=world, device=device, timeout=60)
    mesh = build_mesh(Degrees(dp_shard=world), rank=rank, device=device)
    found = {name: run_step(path, mesh, name) for name in STEPS}
    found["adam"] = run_adam(path, mesh)
    found["publish"] = run_publish(path, mesh)
    found["checkpoint"] = run_checkpoint(path, mesh, out)
    torch.save(found, out / f"rank-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
