"""From a model and its checkpoint directory to an engine that can be served.

Owns defaults that come from the checkpoint (context, picture limits); the model itself is handed in.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from core.data.images import MAX_PIXELS, MIN_PIXELS
from core.inference.embedded.batch import Batch
from core.inference.embedded.engine import Engine
from core.inference.embedded.pictures import Pictures
from core.inference.embedded.request import ModelTraits
from core.inference.embedded.server import EmbeddedServer
from core.ops.packed import CausalVLM

BEFORE_ANY = "-1"
"""The weight version before the first update: below every version that a trainer publishes."""


class ModelArgs(Protocol):
    """What the arguments of a model tell about it."""

    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    image_token_id: int | None
    video_token_id: int | None
    vision: Any

    @property
    def spatial_merge_size(self) -> int: ...

    @property
    def tokens_per_second(self) -> float: ...


def traits_of(args: ModelArgs, context_length: int | None = None) -> ModelTraits:
    return ModelTraits(
        vocab_size=args.vocab_size,
        context_length=context_length or args.max_position_embeddings,
        eos_token_ids=tuple(args.eos_token_ids),
        image_token_id=args.image_token_id,
        video_token_id=args.video_token_id,
        has_vision=args.vision is not None,
        merge=args.spatial_merge_size if args.vision is not None else 2,
        tokens_per_second=args.tokens_per_second,
    )


def picture_limits(directory: Path) -> tuple[int, int]:
    """(min_pixels, max_pixels) of a checkpoint's processor, in either of its layouts."""
    try:
        read = json.loads((directory / "preprocessor_config.json").read_text())
    except FileNotFoundError:
        return MIN_PIXELS, MAX_PIXELS
    size = read.get("size") or {}
    return (
        int(read.get("min_pixels") or size.get("shortest_edge") or MIN_PIXELS),
        int(read.get("max_pixels") or size.get("longest_edge") or MAX_PIXELS),
    )


def assemble(
    model: CausalVLM,
    args: ModelArgs,
    load: Callable[[Path], None],
    *,
    directory: Path,
    token: str | None,
    context_length: int | None = None,
    max_running_requests: int = 64,
    max_prefill_tokens: int = 8192,
    deterministic: bool = False,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    version: str = BEFORE_ANY,
) -> EmbeddedServer:
    """A server whose engine is not started yet. `load` copies a directory's tensors into `model`, all or none."""
    traits = traits_of(args, context_length)
    batch = Batch(
        model,
        traits,
        max_running=max_running_requests,
        max_prefill_tokens=max_prefill_tokens,
        deterministic=deterministic,
        device=torch.device(device),
        dtype=dtype,
    )
    min_pixels, max_pixels = picture_limits(directory)
    engine = Engine(batch, load, version=version, model_path=str(directory))
    return EmbeddedServer(engine, traits, Pictures(min_pixels=min_pixels, max_pixels=max_pixels), token=token)
