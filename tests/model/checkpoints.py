"""Random tiny checkpoints made by transformers, and packed batches of documents with images."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from core.data.mrope import mrope_position_ids
from core.ops.packed import PackedBatch

IMAGE, VIDEO, START, END = 60, 61, 58, 59
Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Shape:
    """Sizes of a random checkpoint."""

    tied: bool = False
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 32
    layers: int = 2
    vocab: int = 96
    section: tuple[int, int, int] = (1, 1, 2)
    vision_hidden: int = 32
    vision_heads: int = 2
    vision_depth: int = 3
    full: tuple[int, ...] = (1,)
    merge_window: int = 112
    tokens_per_second: int = 2


@dataclass(frozen=True)
class Document:
    """Token ids with expanded placeholders, and the grids they stand for."""

    ids: list[int]
    grids: list[Grid] = field(default_factory=list)
    videos: list[Grid] = field(default_factory=list)


def vlm(shape: Shape, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' model with random weights (norms and biases too, which it would leave at one and zero)."""
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "intermediate_size": 48,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(shape.section)},
            "bos_token_id": 1,
            "eos_token_id": 2,
            "tie_word_embeddings": shape.tied,
        },
        vision_config={
            "depth": shape.vision_depth,
            "hidden_size": shape.vision_hidden,
            "intermediate_size": 40,
            "num_heads": shape.vision_heads,
            "out_hidden_size": shape.hidden,
            "window_size": shape.merge_window,
            "fullatt_block_indexes": list(shape.full),
            "tokens_per_second": shape.tokens_per_second,
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=shape.tied,
    )
    return _randomised(Qwen2_5_VLForConditionalGeneration(config), seed, dtype)


def text_model(shape: Shape, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' Qwen2 with random weights."""
    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=48,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=shape.tied,
        eos_token_id=2,
    )
    return _randomised(Qwen2ForCausalLM(config), seed, dtype)


def _randomised(model: Any, seed: int, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(seed)
    model = model.to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale, centre = (0.1, 1.0) if "norm" in name or "ln_q" in name else (0.08, 0.0)
            parameter.copy_(centre + scale * noise)
    return model


def document(rng: np.random.Generator, *parts: int | Grid | str) -> Document:
    """A document of text runs (a number of tokens), images (a grid) and videos ("TxHxW"), in this order."""
    ids: list[int] = []
    grids: list[Grid] = []
    videos: list[Grid] = []
    for part in parts:
        if isinstance(part, int):
            ids.extend(rng.integers(3, 58, part).tolist())
            continue
        grid = tuple(int(n) for n in part.split("x")) if isinstance(part, str) else part
        (videos if isinstance(part, str) else grids).append(grid)  # type: ignore[arg-type]
        token = VIDEO if isinstance(part, str) else IMAGE
        ids.extend([START, *([token] * (grid[0] * grid[1] * grid[2] // 4)), END])
    return Document(ids, grids, videos)


def pixels(rng: np.random.Generator, grids: list[Grid], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random patches of all grids."""
    count = sum(t * h * w for t, h, w in grids)
    return torch.from_numpy(rng.standard_normal((count, 1176))).to(dtype)


def pack(documents: list[Document], pixel_values: torch.Tensor | None, **more: Any) -> PackedBatch:
    """Documents of images OR of videos end to end (in one document, kinds are not mixed here)."""
    lengths = [len(d.ids) for d in documents]
    positions = [
        mrope_position_ids(
            np.array(d.ids), d.grids + d.videos, image_token_id=IMAGE, video_token_id=VIDEO, tokens_per_second=2
        )
        for d in documents
    ]
    return PackedBatch(
        input_ids_T=torch.tensor([i for d in documents for i in d.ids]),
        position_ids_3T=torch.from_numpy(np.concatenate(positions, axis=1)),
        cu_seqlens=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
        pixel_values_PK=pixel_values,
        grid_thw=tuple(g for d in documents for g in d.grids + d.videos),
        **more,
    )


def hf_logits(model: Any, item: Document, pixel_values: torch.Tensor | None) -> torch.Tensor:
    """transformers' logits [T, V] of one document, alone."""
    ids = torch.tensor([item.ids])
    more: dict[str, Any] = {}
    if item.grids or item.videos:
        more["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    if item.grids:
        more |= {"pixel_values": pixel_values, "image_grid_thw": torch.tensor(item.grids)}
    if item.videos:
        more |= {"pixel_values_videos": pixel_values, "video_grid_thw": torch.tensor(item.videos)}
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **more).logits[0]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a-b| / max|b|; two tensors of zeros are equal."""
    assert a.shape == b.shape
    difference, scale = (a - b).abs().max().item(), b.abs().max().item()
    return 0.0 if difference == 0.0 else difference / max(scale, 1e-300)


def saved(model: Any, path: Path) -> Path:
    """The checkpoint of a transformers model, in the hub's layout."""
    model.save_pretrained(path)
    return path
