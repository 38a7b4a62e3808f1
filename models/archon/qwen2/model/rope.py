"""Which axis turns which channel, in the text decoder and in the tower.

Owns the layout of the two rotary embeddings of Qwen2.5-VL; the rotation itself is core.ops.rope.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.ops.rope import inverse_frequencies, tables
from models.archon.qwen2.model.args import Qwen2ModelArgs, VisionArgs

VISION_THETA = 10000.0


def text_tables(args: Qwen2ModelArgs, position_ids_3T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, d/2], computed in float32 or wider and rounded to the model's dtype."""
    device = position_ids_3T.device
    inv_freq = inverse_frequencies(args.rope_theta, args.head_dim, dtype=_wide(dtype), device=device)
    axes = [axis for axis, width in enumerate(args.mrope_section) for _ in range(width)]
    return tables(position_ids_3T.t(), inv_freq, torch.tensor(axes, device=device), dtype)


def vision_tables(args: VisionArgs, position_P2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [P, d/2] from rows and columns; the tower rotates in float32 or wider, so they stay that wide."""
    width = args.hidden_size // args.num_heads // 2
    half = inverse_frequencies(VISION_THETA, width, dtype=_wide(dtype), device=position_P2.device)
    axes = [0] * half.numel() + [1] * half.numel()
    return tables(position_P2, torch.cat((half, half)), torch.tensor(axes, device=position_P2.device), _wide(dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
