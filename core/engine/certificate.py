"""One step of an engine as numbers that a step of another layout can be held against.

Owns what is compared (loss, every scored token, gradient norm, every gradient) and how far apart two of them are; who
runs which layouts, and what distance is too far, is the caller's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from core.engine.documents import Document, TokenRules, pack_documents
from core.engine.microbatch import Limits, pack
from core.engine.train_engine import Micro, TrainEngine
from core.ops.packed import Scores
from core.parallel.mesh import Mesh

ENTROPY_SHARE = 0.1  # of the loss, so that the entropy's gradient is compared too


@dataclass(frozen=True)
class Work:
    """What every layout computes: documents, their pixels, and a weight for the loss of each scored token."""

    documents: Sequence[Document]
    pixels: Mapping[str, NDArray[np.uint8]]
    rules: TokenRules
    limits: Limits
    seed: int = 0

    def weights(self) -> list[Tensor]:
        """One to three, so that no two tokens may change places unseen."""
        generator = torch.Generator().manual_seed(self.seed)
        return [1 + 2 * torch.rand(d.scored, generator=generator, dtype=torch.float64) for d in self.documents]


@dataclass(frozen=True)
class Seen:
    """What a layout computed; gradients stay at the engine's parameters until they are compared."""

    loss: float
    grad_norm: float
    logp: dict[str, Tensor]
    entropy: dict[str, Tensor]


@dataclass
class Distances:
    """How far a layout is from a reference; 0 is equal. max|a−b| / max|b| unless said."""

    loss: float
    grad_norm: float
    logp: float
    entropy: float
    logp_rms: float  # ‖a−b‖ / ‖b‖
    entropy_rms: float
    gradients_rms: float = 0.0  # over all gradients as one vector
    norm_gap: float = 0.0  # of the norm that the engine reports from that of the gradients, gathered whole
    worst: float = 0.0  # of a single gradient
    worst_name: str = ""
    named: dict[str, float] = field(default_factory=dict)


def step(engine: TrainEngine, work: Work) -> Seen:
    """Forward and backward of the work on this layout; collective."""
    mesh = engine.mesh
    documents, weights = work.documents, work.weights()
    (minibatch,) = pack([d.item() for d in documents], ranks=mesh.dp_size, limits=work.limits).minibatches
    own = minibatch.ranks[mesh.dp_rank]
    count = sum(document.scored for document in documents)
    logp: dict[str, Tensor] = {}
    entropy: dict[str, Tensor] = {}

    def micro(j: int) -> Micro:
        chosen = [documents[i] for i in own[j]]
        make = lambda: pack_documents(chosen, work.pixels, work.rules, tower=minibatch.tower[j], with_entropy=True)  # noqa: E731
        return Micro(make, empty=not chosen)

    def loss(j: int, scores: Scores) -> Tensor:
        assert scores.entropy_R is not None
        lengths = [documents[i].scored for i in own[j]]
        for values, found in ((scores.logp_R, logp), (scores.entropy_R, entropy)):
            pieces = values.detach().cpu().double().split(lengths)
            found |= {documents[i].name: piece for i, piece in zip(own[j], pieces, strict=True)}
        weight_R = torch.cat([weights[i] for i in own[j]]).to(scores.logp_R)
        return (weight_R * (ENTROPY_SHARE * scores.entropy_R - scores.logp_R)).sum() / count

    value, norm = engine.accumulate([micro(j) for j in range(len(own))], loss)
    return Seen(value, norm, _everywhere(mesh, logp), _everywhere(mesh, entropy))


def gradients(engine: TrainEngine) -> Iterator[tuple[str, Tensor]]:
    """Every gradient whole, one at a time; all ranks must exhaust it together."""
    for name, parameter in engine.parameters.items():
        if parameter.grad is not None:
            found = parameter.grad
            yield name, found.full_tensor() if isinstance(found, DTensor) else found


def compare(seen: Seen, expected: Seen, found: Iterator[tuple[str, Tensor]], wanted: Mapping[str, Tensor]) -> Distances:
    """Distance of a layout from the reference. `wanted` may be empty where only another rank compares gradients."""
    logp, entropy = (
        (_joined(a, b), _joined(b, b)) for a, b in ((seen.logp, expected.logp), (seen.entropy, expected.entropy))
    )
    result = Distances(
        _far(torch.tensor(seen.loss), torch.tensor(expected.loss)),
        _far(torch.tensor(seen.grad_norm), torch.tensor(expected.grad_norm)),
        _far(*logp),
        _far(*entropy),
        _rms(*logp),
        _rms(*entropy),
    )
    difference, scale, squares = 0.0, 0.0, 0.0
    left = set(wanted)
    for name, gradient in found:
        if not wanted:
            continue
        reference = wanted[name].to(device=gradient.device)
        left.remove(name)
        result.named[name] = _far(gradient, reference)
        difference += (gradient.double() - reference.double()).square().sum().item()
        scale += reference.double().square().sum().item()
        squares += gradient.double().square().sum().item()
    result.named |= dict.fromkeys(left, math.inf)
    result.gradients_rms = math.sqrt(difference / scale) if scale else math.sqrt(difference)
    if wanted:
        result.norm_gap = _far(torch.tensor(seen.grad_norm), torch.tensor(math.sqrt(squares)))
    if result.named:
        result.worst_name = max(result.named, key=lambda name: result.named[name])
        result.worst = result.named[result.worst_name]
    return result


def _far(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    difference, scale = (a.double() - b.double()).abs().max().item(), b.double().abs().max().item()
    if not math.isfinite(difference):
        return math.inf
    return 0.0 if difference == 0.0 else difference / scale if scale else math.inf


def _rms(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def _joined(values: dict[str, Tensor], order: dict[str, Tensor]) -> Tensor:
    return torch.cat([values[name] for name in order])


def _everywhere(mesh: Mesh, own: dict[str, Tensor]) -> dict[str, Tensor]:
    if mesh.world is None or mesh.size == 1:
        return own
    found: list[Any] = [None] * mesh.size
    dist.all_gather_object(found, own, group=mesh.world)
    return {name: value for part in found for name, value in part.items()}
