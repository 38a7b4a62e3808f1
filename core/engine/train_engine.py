"""One model on its mesh: scores micro-batches, takes optimizer steps, gives out whole weights.

Owns the model, its optimizer and the order of forwards, so that ranks stay in step; it knows a model by CausalVLM only,
no loss (the caller gives one) and no file (core.engine.checkpoint).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from core.engine.optimizer import Optimizer, gradient_norm, scale_gradients
from core.ops.packed import PackedBatch, Scores
from core.parallel.fsdp import gather_whole, owners
from core.parallel.layers import sum_partial_gradients
from core.parallel.mesh import Mesh
from core.telemetry.phases import announce

# below this, gradients of several micro-batches are summed unsharded and reduced once
REDUCE_ONCE_BELOW = 20_000_000

Loss = Callable[[int, Scores], Tensor]
MakeBatch = Callable[[], PackedBatch]


@dataclass(frozen=True)
class Micro:
    """A micro-batch of this rank: how to build it, and whether it is an empty one that only keeps ranks in step."""

    make: MakeBatch
    empty: bool = False


@dataclass(frozen=True)
class Update:
    """What one optimizer step did."""

    loss: float  # of the whole minibatch, over all ranks
    grad_norm: float
    skipped: bool  # loss or gradient was not finite: nothing moved
    forward_backward_secs: float
    optimizer_secs: float


class TrainEngine:
    """A parallelized model with loaded weights, its optimizer and its mesh."""

    def __init__(self, model: nn.Module, mesh: Mesh, optimizer: Any, *, compute_dtype: torch.dtype) -> None:
        self.model = model
        self.mesh = mesh
        self.settings = optimizer
        self.compute_dtype = compute_dtype
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.optimizer = None if optimizer is None else Optimizer(self.parameters, optimizer)
        self._reduce_once = sum(p.numel() for p in self.parameters.values()) < REDUCE_ONCE_BELOW
        sizes = {name: p.numel() for name, p in self.parameters.items()}
        self.owners = owners(sizes, mesh.size)

    @torch.no_grad()
    def score(self, micros: Sequence[Micro], between: Callable[[], None] = lambda: None) -> list[Scores]:
        """Scores of every micro-batch, with the kernels and the packing that training them will use."""
        found = []
        for micro in micros:
            between()
            announce("scoring")
            scores = self._forward(micro)
            found.append(Scores(scores.logp_R[:0], None) if micro.empty else scores)
        return found

    @torch.no_grad()
    def most_likely(self, micros: Sequence[Micro]) -> list[Tensor]:
        """For every scored row of each micro-batch the id with the largest logit."""
        found = []
        for micro in micros:
            batch = micro.make()
            assert batch.scoring is not None
            wanted = replace(batch, scoring=None, logit_rows_R=batch.scoring.row_R)
            logits_RV = self.model(wanted.to(self.mesh.device)).logits_RV
            found.append(logits_RV[:0, 0].long() if micro.empty else logits_RV.argmax(1))
        return found

    def train(
        self, micros: Sequence[Micro], loss: Loss, lr: float, between: Callable[[], None] = lambda: None
    ) -> Update:
        """One optimizer step over the micro-batches of a minibatch.

        `loss(j, scores)` is micro-batch j's part of the loss, already over the global number of loss tokens.
        `between` is called before each micro-batch; what it raises discards the step.
        """
        assert self.optimizer is not None, "this engine was built without an optimizer"
        start = time.perf_counter()
        value, norm = self.accumulate(micros, loss, between)
        middle = time.perf_counter()
        skipped = not (math.isfinite(value) and math.isfinite(norm))
        if not skipped:
            limit = self.settings.gradient_clipping
            if limit > 0 and norm > limit:
                scale_gradients(self.parameters, limit / norm)
            self.optimizer.step(lr)
        self.zero_grad()
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize()  # else the update's time is counted where its result is first used
        return Update(value, norm, skipped, middle - start, time.perf_counter() - middle)

    def accumulate(
        self, micros: Sequence[Micro], loss: Loss, between: Callable[[], None] = lambda: None
    ) -> tuple[float, float]:
        """Leaves a minibatch's gradient at the parameters; returns the loss over all ranks and the gradient's norm."""
        self.zero_grad()
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        for j, micro in enumerate(micros):
            between()
            last = j == len(micros) - 1
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(last or not self._reduce_once)
            announce("forward")
            scores = self._forward(micro)
            announce("backward")
            part = 0.0 * scores.logp_R.sum() if micro.empty else loss(j, scores)
            part.backward()
            total += part.detach()
        announce("step")
        if self.mesh.dp is not None:
            dist.all_reduce(total, group=self.mesh.dp)
        sum_partial_gradients(self.parameters.values(), self.mesh.team.tp)
        return total.item(), gradient_norm(self.parameters, self.mesh.world)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def publish_share(self) -> dict[str, Tensor]:
        """The whole tensors that this rank writes, in the published dtype, on the host; all ranks call it together."""
        share = {}
        for name, tensor in gather_whole(self.model, self.compute_dtype):
            if self.owners[name] == self.mesh.rank:
                share[name] = torch.empty_like(tensor, device="cpu").copy_(tensor).contiguous()
        return share

    def _forward(self, micro: Micro) -> Scores:
        output = self.model(micro.make().to(self.mesh.device))
        assert output.scores is not None
        return output.scores
