"""What the ranks of the pool run: steps of the trainer's own engine, with everything about them gathered whole.

The same functions run in the test process on one rank, which is what all layouts are compared with.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from core.engine import checkpoint
from core.engine.microbatch import Limits
from core.engine.train_engine import TrainEngine
from core.parallel.mesh import Mesh
from tests.engine.scene import ADAM, make_batch, make_engine, policy_step

LIMITS = Limits(120, 480)


def measure(
    mesh: Mesh,
    *,
    path: Path,
    images: str = "some",
    dtype: str = "float32",
    steps: int = 1,
    limits: Limits = LIMITS,
    lr: float = 1e-3,
    deterministic: bool = False,
    **engine_settings: Any,
) -> dict[str, Any]:
    """Steps of AdamW: of the first loss, scores, norm, every gradient; at the end moments and weights."""
    torch.use_deterministic_algorithms(deterministic)
    engine = make_engine(path, mesh, dtype=dtype, optimizer=ADAM, **engine_settings)
    gradients: list[dict[str, Tensor]] = []
    assert engine.optimizer is not None
    update = engine.optimizer.step

    def step(rate: float) -> None:
        if not gradients:
            named = engine.parameters.items()
            gradients.append({name: whole(p.grad) for name, p in named if p.grad is not None})
        update(rate)

    engine.optimizer.step = step  # type: ignore[method-assign]
    batch = make_batch(path, images=images)
    # advantages around 0 would leave a loss that is the small difference of large sums
    batch = replace(batch, advantage=[advantage_R + 1.5 for advantage_R in batch.advantage])
    done = [policy_step(engine, batch, limits, lr=lr) for _ in range(steps)]
    return {
        "loss": torch.tensor([each.update.loss for each in done], dtype=torch.float64),
        "grad_norm": torch.tensor([each.update.grad_norm for each in done], dtype=torch.float64),
        "logp": everywhere(mesh, done[0].logp),
        "entropy": everywhere(mesh, done[0].entropy),
        "gradients": gradients[0],
        "moments": {name: whole(tensor) for name, tensor in engine.optimizer.state().items()},
        "weights": weights(engine),
    }


def save(mesh: Mesh, *, path: Path, root: Path) -> dict[str, Any]:
    """Two steps and a checkpoint; what the engine held then, and what it would publish."""
    engine = make_engine(path, mesh, optimizer=ADAM, dtype="float32", one_unit=False)
    for _ in range(2):
        policy_step(engine, make_batch(path), LIMITS, lr=1e-3)
    checkpoint.save(root, 2, engine, {"place": 5}, keep=2, gather=lambda value: gathered(mesh, value))
    shares = gathered(mesh, engine.publish_share())
    return {**state(engine), "published": [(name, tensor) for share in shares for name, tensor in share.items()]}


def load(mesh: Mesh, *, path: Path, root: Path) -> dict[str, Any]:
    """What a new engine of this layout holds after loading; it trains on after that."""
    engine = make_engine(path, mesh, optimizer=ADAM, dtype="float32", one_unit=False)
    loaded = checkpoint.load(root, engine, gather=lambda value: gathered(mesh, value))
    assert loaded is not None
    found = {**state(engine), "place": loaded.state["place"]}
    update = policy_step(engine, make_batch(path), LIMITS, lr=1e-3).update
    return {**found, "loss": update.loss}


def state(engine: TrainEngine) -> dict[str, Any]:
    assert engine.optimizer is not None
    moments = {name: whole(tensor) for name, tensor in engine.optimizer.state().items()}
    return {"weights": weights(engine), "moments": moments, "updates": dict(engine.optimizer.updates)}


def steps_of_layouts(mesh: Mesh, *, path: Path, tries: list[tuple[dict[str, Any], Limits, list[int]]]) -> list[Any]:
    """Loss and gradient norm of a part of the batch's samples, for each try."""
    found = []
    for settings, limits, chosen in tries:
        batch = make_batch(path)
        kept = {name: [getattr(batch, name)[i] for i in chosen] for name in ("documents", "behave", "advantage")}
        engine = make_engine(path, mesh, dtype="float64", **settings)
        update = policy_step(engine, replace(batch, **kept), limits, recompute=False).update
        found.append((update.loss, update.grad_norm))
    return found


def gathered(mesh: Mesh, value: object) -> list[Any]:
    found: list[Any] = [None] * mesh.size
    dist.all_gather_object(found, value)
    return found


def weights(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in engine.parameters.items()}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def everywhere(mesh: Mesh, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of all samples from the ranks that had them; ranks of a team must agree."""
    if mesh.world is None:
        return own
    together: dict[str, Tensor] = {}
    for part in gathered(mesh, own):
        for name, value in part.items():
            assert name not in together or torch.equal(together[name], value), f"ranks of a team differ on {name}"
            together[name] = value
    return together


def hang(mesh: Mesh) -> None:
    """Rank 0 never comes to the barrier that ends a job."""
    if mesh.rank == 0:
        time.sleep(3600)
