"""Rotary position embedding: angles from position ids, and the rotation.

Owns the arithmetic for text (multimodal sections) and vision (height and width); the ids themselves come from
core.data.mrope. Tables hold one value per pair of channels: the halves of a head share them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.data.mrope import PlaceholderError, mrope_position_ids

__all__ = ["PlaceholderError", "inverse_frequencies", "mrope_position_ids", "rotate", "tables"]


def inverse_frequencies(theta: float, width: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """theta^(-2i/width) for i < width/2, in `dtype`."""
    exponent = torch.arange(0, width, 2, dtype=torch.int64, device=device).to(dtype) / width
    return 1.0 / (theta**exponent)


def tables(position_NA: Tensor, inv_freq_F: Tensor, axis_F: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [N, F]: channel pair f turns by the position on axis `axis_F[f]`; rounded to `dtype` last."""
    angle_NF = position_NA.index_select(1, axis_F).to(inv_freq_F.dtype) * inv_freq_F
    return angle_NF.cos().to(dtype), angle_NF.sin().to(dtype)


def rotate(x_NHd: Tensor, cos_NF: Tensor, sin_NF: Tensor) -> Tensor:
    """Rotates channel f with channel f + d/2 (no interleaving), in the dtype of the tables, back to that of x."""
    x = x_NHd.to(cos_NF.dtype)
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos_NF.unsqueeze(1), sin_NF.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_NHd.dtype)
