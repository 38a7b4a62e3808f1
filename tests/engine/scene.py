"""A tiny checkpoint, a batch of groups with and without images, and one policy step on any mesh.

Used by the tests of one process and by the rank processes of ranks.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import Tensor

from core.engine.documents import Document, TokenRules, pack_documents, sample_numbers
from core.engine.microbatch import Limits, pack
from core.engine.train_engine import Micro, TrainEngine, Update
from core.ops.packed import Scores
from core.parallel.mesh import Degrees, Mesh, build_mesh
from core.rl.losses import LossCounts, LossTokens, PolicyLoss, counts_of, policy_loss
from launcher.roles.tiny.checkpoint import TinyModel, write_checkpoint
from models.archon.qwen2.infra import parallelize as infra
from models.archon.registry import family_of

SGD = SimpleNamespace(type="sgd", lr=1.0, weight_decay=0.0, gradient_clipping=0.0)
ADAM = SimpleNamespace(type="adam", lr=2e-6, weight_decay=0.01, beta1=0.9, beta2=0.999, eps=1e-8, gradient_clipping=1.0)
SIZES = TinyModel(
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    intermediate=48,
    vision_depth=2,
    vision_hidden=32,
    vision_heads=2,
    vision_intermediate=40,
    initializer_range=0.2,
    jitter=0.1,
)


def make_checkpoint(path: Path, *, tied: bool = True) -> Path:
    write_checkpoint(path, TinyModel(**{**vars(SIZES), "tied": tied}))
    return path


def alone() -> Mesh:
    return build_mesh(Degrees(), rank=0, device=torch.device("cpu"))


def make_engine(
    path: Path,
    mesh: Mesh,
    *,
    dtype: str = "float64",
    optimizer: Any = SGD,
    checkpointing: str = "none",
    one_unit: bool = True,
    freeze_vision: bool = False,
    cp_style: str = "ulysses",
    every: str | None = None,
) -> TrainEngine:
    """An engine as the trainer builds it."""
    compute = getattr(torch, dtype)
    family = family_of(path)
    args = family.args.from_pretrained(path, dtype=infra.master_dtype(compute))
    model = family.model.on_meta(args, team=mesh.team, cp_style=cp_style)
    actor = SimpleNamespace(
        freeze_vision=freeze_vision,
        gradient_checkpointing=checkpointing != "none",
        dtype=dtype,
        grad_reduce_dtype="float64" if dtype == "float64" else "float32",
        archon=SimpleNamespace(
            ac_mode=checkpointing,
            selective_ac_option=every or "op",
            reshard_after_forward_policy="default",
            enable_compile=False,
        ),
    )
    infra.parallelize(model, mesh, actor, one_unit_below=infra.ONE_UNIT_BELOW if one_unit else 0)
    model.to_empty(device=mesh.device)
    model.tie()
    family.adapter(args).load_into(model, path)
    return TrainEngine(model, mesh, optimizer, compute_dtype=compute)


@dataclass(frozen=True)
class Batch:
    """Documents of several groups, what was sampled, and what it earned."""

    documents: list[Document]
    pixels: dict[str, np.ndarray]
    rules: TokenRules
    behave: list[Tensor]
    advantage: list[Tensor]

    @property
    def loss_tokens(self) -> int:
        return sum(document.scored for document in self.documents)


def make_batch(path: Path, *, images: str = "some", temperature: float = 0.7) -> Batch:
    """Six groups of one to four samples of odd lengths; some groups have images, one has, or none has."""
    family = family_of(path)
    args = family.args.from_pretrained(path)
    generator = np.random.default_rng(7)
    rules = TokenRules(
        args.image_token_id,
        args.video_token_id,
        args.spatial_merge_size,
        args.tokens_per_second,
        temperature=temperature,
        ends=args.eos_token_ids,
        min_new_tokens=2,
    )
    documents: list[Document] = []
    pixels: dict[str, np.ndarray] = {}
    sizes = [(56, 84), (28, 28), (112, 56), (56, 56)]
    for g, count in enumerate([4, 1, 3, 2, 4, 2]):
        shown: list[tuple[str, tuple[int, int, int]]] = []
        wanted = {"some": (1, 2, 0, 1, 0, 1), "one": (0, 0, 2, 0, 0, 0), "none": (0,) * 6}[images][g]
        for k in range(wanted):
            h, w = sizes[(g + k) % len(sizes)]
            pixels[f"{g}/{k}"] = generator.integers(0, 255, (h, w, 3), dtype=np.uint8)
            shown.append((f"{g}/{k}", (1, h // 14, w // 14)))
        prompt = [int(i) for i in generator.integers(300, 340, 5 + g)]
        for _, (t, h, w) in shown:
            prompt += [301, *[int(args.image_token_id)] * (t * h * w // 4), 302]
        for i in range(count):
            answer = [int(x) for x in generator.integers(40, 250, 3 + (g + 2 * i) % 5)]
            documents.append(Document(f"{g}-{i}", np.array(prompt + answer), len(prompt), tuple(shown), f"group {g}"))
    torch.manual_seed(3)
    behave = [-torch.rand(document.scored, dtype=torch.float64) * 2 - 4 for document in documents]
    advantage = [torch.randn(document.scored, dtype=torch.float64) for document in documents]
    return Batch(documents, pixels, rules, behave, advantage)


@dataclass
class Step:
    """What one policy step saw and did on this rank."""

    update: Update
    counts: LossCounts
    logp: dict[str, Tensor] = field(default_factory=dict)  # this rank's samples
    entropy: dict[str, Tensor] = field(default_factory=dict)


def policy_step(
    engine: TrainEngine,
    batch: Batch,
    limits: Limits | None = None,
    settings: PolicyLoss | None = None,
    lr: float = 1.0,
    recompute: bool = True,
) -> Step:
    """Scores the batch, then trains one minibatch of it."""
    mesh = engine.mesh
    limits, settings = limits or Limits(), settings or PolicyLoss(behave_imp_weight_cap=None)
    items = [document.item() for document in batch.documents]
    (minibatch,) = pack(items, ranks=mesh.dp_size, limits=limits).minibatches
    own = minibatch.ranks[mesh.dp_rank]

    def micro(j: int, entropy: bool) -> Micro:
        documents = [batch.documents[i] for i in own[j]]
        return Micro(
            lambda: pack_documents(
                documents, batch.pixels, batch.rules, tower=minibatch.tower[j], with_entropy=entropy
            ),
            empty=not documents,
        )

    scored = engine.score([micro(j, True) for j in range(len(own))]) if recompute else []
    counted: list[Tensor] = []

    def loss(j: int, scores: Scores) -> Tensor:
        documents = [batch.documents[i] for i in own[j]]
        tokens = LossTokens(
            behave_R=torch.cat([batch.behave[i] for i in own[j]]),
            advantage_R=torch.cat([batch.advantage[i] for i in own[j]]),
            sample_R=sample_numbers(documents),
            samples=len(documents),
            prox_R=scored[j].logp_R if recompute else None,
        )
        value, counts = policy_loss(scores.logp_R, tokens, batch.loss_tokens, settings)
        counted.append(counts)
        return value

    update = engine.train([micro(j, False) for j in range(len(own))], loss, lr)
    total = LossCounts()
    for counts in counted:
        total.add(counts_of(counts))
    step = Step(update, total)
    for j, scores in enumerate(scored):
        lengths = [batch.documents[i].scored for i in own[j]]
        assert scores.entropy_R is not None or not lengths
        for i, logp_R in zip(own[j], scores.logp_R.split(lengths), strict=True):
            step.logp[batch.documents[i].name] = logp_R
        if scores.entropy_R is not None:
            for i, entropy_R in zip(own[j], scores.entropy_R.split(lengths), strict=True):
                step.entropy[batch.documents[i].name] = entropy_R
    return step


def whole(engine: TrainEngine) -> dict[str, Tensor]:
    """Every parameter whole, copied."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in engine.parameters.items()
    }
