"""AdamW and SGD on the masters of this rank, the learning rate of a step, and the global gradient norm.

Owns the moments, which live beside the local shard of each parameter (so that an update needs no communication), and
nothing of when a step is taken. Masters, moments and gradients are float32 (float64 for a float64 model).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd


def learning_rate(settings: Any, step: int, total: int) -> float:
    """Of step 1…total: a warm-up that starts above 0, then constant, linear or cosine down to lr·min_lr_ratio."""
    warmup = int(settings.warmup_steps_proportion * total)
    done = step - 1
    if done < warmup:
        return settings.lr * (done + 1) / (warmup + 1)
    share = min(1.0, (done - warmup) / max(1, total - warmup))
    kind, low = settings.lr_scheduler_type, settings.min_lr_ratio
    if kind == "constant":
        return settings.lr
    if kind == "linear":
        return settings.lr * (low + (1 - low) * (1 - share))
    return settings.lr * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * share)))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def decays(parameter: Tensor) -> bool:
    """Norms and biases have one dimension and are not decayed."""
    return parameter.ndim >= 2


class Optimizer:
    """Updates named parameters in place from their gradients; parameters without one are left alone."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: Any) -> None:
        self.parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self.settings = settings
        self.updates = dict.fromkeys(self.parameters, 0)
        moments = ("exp_avg", "exp_avg_sq") if settings.type == "adam" else ()
        self.moments: dict[str, dict[str, Tensor]] = {
            kind: {name: torch.zeros_like(p) for name, p in self.parameters.items()} for kind in moments
        }

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update with decoupled weight decay on everything but norms and biases."""
        for name, p in self.parameters.items():
            self.updates[name] += p.grad is not None
        for decayed in (True, False):
            names = [
                name
                for name, p in self.parameters.items()
                if p.grad is not None and decays(p) == decayed and local(p).numel() > 0
            ]
            if names:
                self._update(names, lr, self.settings.weight_decay if decayed else 0.0)

    def _update(self, names: list[str], lr: float, weight_decay: float) -> None:
        parameters = [local(self.parameters[name]).detach() for name in names]
        gradients = [local(self.parameters[name].grad) for name in names]  # type: ignore[arg-type]
        if self.settings.type == "sgd":
            sgd(
                parameters,
                gradients,
                [None] * len(names),
                foreach=True,
                weight_decay=weight_decay,
                momentum=0.0,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            return
        # adamw() counts this update itself
        steps = [torch.tensor(self.updates[name] - 1.0, device=local(self.parameters[name]).device) for name in names]
        adamw(
            parameters,
            gradients,
            [local(self.moments["exp_avg"][name]) for name in names],
            [local(self.moments["exp_avg_sq"][name]) for name in names],
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=self.settings.beta1,
            beta2=self.settings.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self.settings.eps,
            maximize=False,
        )

    def state(self) -> dict[str, Tensor]:
        """Moments by `<kind>.<parameter>`, sharded as the parameters are."""
        return {f"{kind}.{name}": moment for kind, named in self.moments.items() for name, moment in named.items()}


@torch.no_grad()
def gradient_norm(parameters: Mapping[str, nn.Parameter], world: dist.ProcessGroup | None) -> float:
    """The 2-norm of the whole gradient, however its parts are sharded or replicated over the ranks of `world`."""
    size = 1 if world is None else world.size()
    by_copies: dict[float, list[Tensor]] = {}
    device = torch.device("cpu")
    for parameter in parameters.values():
        if parameter.grad is not None:
            gradient = local(parameter.grad)
            device = gradient.device
            by_copies.setdefault(_copies(parameter, size), []).append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, gradients in by_copies.items():
        norms = torch.stack(torch._foreach_norm(gradients))
        total += norms.double().square().sum() / copies
    if world is not None and size > 1:
        dist.all_reduce(total, group=world)
    return math.sqrt(total.item())


@torch.no_grad()
def scale_gradients(parameters: Mapping[str, nn.Parameter], factor: float) -> None:
    """Multiplies every gradient in place."""
    gradients = [local(p.grad) for p in parameters.values() if p.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def _copies(parameter: Tensor, world: int) -> float:
    """How many ranks hold each element of a parameter."""
    if not isinstance(parameter, DTensor):
        return float(world)
    mesh = parameter.device_mesh
    replicas = math.prod(mesh.size(i) for i, kind in enumerate(parameter.placements) if isinstance(kind, Replicate))
    return replicas * world / mesh.size()
