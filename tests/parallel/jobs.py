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

from core.engine.microbatch import Limits
from core.engine.train_engine import TrainEngine
from core.parallel.mesh import Mesh
from tests.engine.scene import ADAM, Step, make_batch, make_engine, policy_step

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
    **engine_settings: Any,
) -> dict[str, Any]:
    """Steps of AdamW: of the first loss, scores, norm, every gradient; at the end moments and weights."""
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


def weights(engine: TrainEngine) -> dict[str, Tensor]:
    return {name: whole(p) for name, p in engine.parameters.items()}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def everywhere(mesh: Mesh, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values of all samples from the ranks that had them; ranks of a team must agree."""
    if mesh.world is None:
        return own
    found: list[Any] = [None] * mesh.size
    dist.all_gather_object(found, own)
    together: dict[str, Tensor] = {}
    for part in found:
        for name, value in part.items():
            assert name not in together or torch.equal(together[name], value), f"ranks of a team differ on {name}"
            together[name] = value
    return together


def hang(mesh: Mesh) -> None:
    """Rank 0 never comes to the barrier that ends a job."""
    if mesh.rank == 0:
        time.sleep(3600)


__all__ = ["LIMITS", "Step", "hang", "measure", "weights", "whole"]
