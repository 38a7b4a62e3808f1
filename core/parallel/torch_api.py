"""The calls of torch whose names differ between 2.11 (the GPU images) and 2.13 (CI): the one place that knows it."""

from __future__ import annotations

import torch.distributed as dist

# 2.13 warns on every rank at the older names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
