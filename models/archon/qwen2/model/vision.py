"""The vision tower of Qwen2.5-VL: patches of all images and videos of a batch to embeddings, in one call.

Owns windows, order and layers of the tower; every rank holds it whole, and a team shares out whole images. Names of
modules are the hub's.
Shapes: P patches, K values of a patch, E tower width, H heads, d head width, N merged cells, D width of the text model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from core.ops.attention import attention
from core.ops.rope import rotate
from core.parallel import collectives
from core.parallel.context import share_out
from core.parallel.layers import ReplicatedLinear, RMSNorm, local
from models.archon.qwen2.model.args import VisionArgs
from models.archon.qwen2.model.rope import vision_tables

Grids = tuple[tuple[int, int, int], ...]
NORM_EPS = 1e-6  # fixed in the published tower


class GridError(ValueError):
    """Grids and patches of a batch do not belong together."""


@dataclass(frozen=True)
class TowerOrder:
    """Where patches go, for one tuple of grids; on the CPU."""

    patch_P: Tensor  # patch of the input for each place in window order
    cell_N: Tensor  # place in window order of each merged cell of the input
    position_P2: Tensor  # row and column of each patch, in window order
    window_cu: Tensor
    window_max: int
    frame_cu: Tensor
    frame_max: int


@lru_cache(maxsize=128)
def tower_order(grids: Grids, merge: int, window: int) -> TowerOrder:
    """Windows of `window` x `window` merged cells (ragged at the edges), frame by frame, image by image."""
    cells: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    window_lengths: list[int] = []
    frame_lengths: list[int] = []
    first = 0
    for t, h, w in grids:
        if t < 1 or h < merge or w < merge or h % merge or w % merge:
            raise GridError(f"grid {t}x{h}x{w} has no whole {merge}x{merge} cells")
        rows, cols = h // merge, w // merge
        frame = np.arange(rows * cols).reshape(rows, cols)
        tiles = [
            frame[r : r + window, c : c + window].ravel()
            for r in range(0, rows, window)
            for c in range(0, cols, window)
        ]
        order = np.concatenate(tiles)
        cells.extend(first + i * rows * cols + order for i in range(t))
        window_lengths.extend([tile.size * merge * merge for tile in tiles] * t)
        frame_lengths.extend([h * w] * t)
        row, col = np.meshgrid(np.arange(h), np.arange(w), indexing="ij")
        grid = np.stack((row, col), -1).reshape(rows, merge, cols, merge, 2).transpose(0, 2, 1, 3, 4)
        positions.extend([grid.reshape(rows * cols, merge * merge, 2)[order].reshape(-1, 2)] * t)
        first += t * rows * cols
    cell = np.concatenate(cells)
    patch = (cell[:, None] * merge * merge + np.arange(merge * merge)).ravel()
    return TowerOrder(
        patch_P=torch.from_numpy(patch),
        cell_N=torch.from_numpy(np.argsort(cell)),
        position_P2=torch.from_numpy(np.concatenate(positions)),
        window_cu=_cumulative(window_lengths),
        window_max=max(window_lengths),
        frame_cu=_cumulative(frame_lengths),
        frame_max=max(frame_lengths),
    )


def _cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


class PatchKernel(nn.Module):
    """A convolution whose stride is its kernel: one product per patch. The weight keeps the hub's five dims."""

    def __init__(self, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))

    def forward(self, pixels_PK: Tensor) -> Tensor:
        weight = local(self.weight).flatten(1)
        return F.linear(pixels_PK.to(weight.dtype), weight)


class PatchEmbed(nn.Module):
    def __init__(self, args: VisionArgs, dtype: torch.dtype) -> None:
        super().__init__()
        shape = (args.hidden_size, args.in_channels, args.temporal_patch_size, args.patch_size, args.patch_size)
        self.proj = PatchKernel(shape, dtype)

    def forward(self, pixels_PK: Tensor) -> Tensor:
        return self.proj(pixels_PK)


class VisionAttention(nn.Module):
    def __init__(self, args: VisionArgs, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = args.hidden_size // args.num_heads
        self.qkv = ReplicatedLinear(args.hidden_size, 3 * args.hidden_size, dtype=dtype)
        self.proj = ReplicatedLinear(args.hidden_size, args.hidden_size, dtype=dtype)

    def forward(self, x_PE: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        q_PHd, k_PHd, v_PHd = self.qkv(x_PE).unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        q_PHd, k_PHd = rotate(q_PHd, cos, sin), rotate(k_PHd, cos, sin)
        return self.proj(attention(q_PHd, k_PHd, v_PHd, cu_seqlens, max_seqlen, causal=False).flatten(1))


class VisionMLP(nn.Module):
    def __init__(self, args: VisionArgs, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = ReplicatedLinear(args.hidden_size, args.intermediate_size, dtype=dtype)
        self.up_proj = ReplicatedLinear(args.hidden_size, args.intermediate_size, dtype=dtype)
        self.down_proj = ReplicatedLinear(args.intermediate_size, args.hidden_size, dtype=dtype)

    def forward(self, x_PE: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_PE)) * self.up_proj(x_PE))


class VisionBlock(nn.Module):
    def __init__(self, args: VisionArgs, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1 = RMSNorm(args.hidden_size, NORM_EPS, dtype=dtype)
        self.norm2 = RMSNorm(args.hidden_size, NORM_EPS, dtype=dtype)
        self.attn = VisionAttention(args, dtype)
        self.mlp = VisionMLP(args, dtype)

    def forward(self, x_PE: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        x_PE = x_PE + self.attn(self.norm1(x_PE), cos, sin, cu_seqlens, max_seqlen)
        return x_PE + self.mlp(self.norm2(x_PE))


class PatchMerger(nn.Module):
    def __init__(self, args: VisionArgs, dtype: torch.dtype) -> None:
        super().__init__()
        self.width = args.hidden_size * args.spatial_merge_size**2
        self.ln_q = RMSNorm(args.hidden_size, NORM_EPS, dtype=dtype)
        self.mlp = nn.Sequential(
            ReplicatedLinear(self.width, self.width, dtype=dtype),
            nn.GELU(),
            ReplicatedLinear(self.width, args.out_hidden_size, dtype=dtype),
        )

    def forward(self, x_PE: Tensor) -> Tensor:
        return self.mlp(self.ln_q(x_PE).view(-1, self.width))


class VisionTower(nn.Module):
    """Patches in, one embedding per merged cell out, in the order of the patches."""

    def __init__(self, args: VisionArgs, dtype: torch.dtype) -> None:
        super().__init__()
        self.args = args
        self.patch_embed = PatchEmbed(args, dtype)
        self.blocks = nn.ModuleList(VisionBlock(args, dtype) for _ in range(args.depth))
        self.merger = PatchMerger(args, dtype)

    def forward(self, pixels_PK: Tensor, grids: Grids) -> Tensor:
        args = self.args
        window = args.window_size // args.spatial_merge_size // args.patch_size
        order = tower_order(grids, args.spatial_merge_size, window)
        if order.patch_P.numel() != pixels_PK.shape[0]:
            raise GridError(f"grids {list(grids)} have {order.patch_P.numel()} patches, the batch {pixels_PK.shape[0]}")
        device = pixels_PK.device
        x_PE = self.patch_embed(pixels_PK)
        x_PE = x_PE.index_select(0, order.patch_P.to(device))
        cos, sin = vision_tables(args, order.position_P2.to(device), x_PE.dtype)
        # lengths are read on the host where attention is dense, so they go to the device only for the varlen kernel
        window_cu, frame_cu = (cu.to(device) for cu in (order.window_cu, order.frame_cu))
        for number, block in enumerate(self.blocks):
            full = number in args.fullatt_block_indexes
            cu, longest = (frame_cu, order.frame_max) if full else (window_cu, order.window_max)
            x_PE = block(x_PE, cos, sin, cu, longest)
        return self.merger(x_PE).index_select(0, order.cell_N.to(device))


class Features:
    """Embeddings of images by content hash, for a tower that does not change; the least used go beyond `limit` bytes.

    What is kept depends on the order of images alone, so the ranks of a team always agree on which are missing.
    """

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._bytes = 0

    @torch.no_grad()
    def of(
        self, names: Sequence[str], pixels_PK: Tensor, grids: Grids, embed: Callable[[Tensor, Grids], Tensor]
    ) -> Tensor:
        """Embeddings of all images, in order; `embed` is called for those that are new, once."""
        pieces = pixels_PK.split([t * h * w for t, h, w in grids])
        missing = [i for i, name in enumerate(names) if name not in self._kept]
        found = {name: self._kept[name] for name in names if name in self._kept}
        if missing:
            new_ED = embed(torch.cat([pieces[i] for i in missing]), tuple(grids[i] for i in missing))
            patches = [pieces[i].shape[0] for i in missing]
            sizes = [count * new_ED.shape[0] // sum(patches) for count in patches]
            found |= {names[i]: part.clone() for i, part in zip(missing, new_ED.split(sizes), strict=True)}
        for name, part in found.items():
            self._bytes += 0 if name in self._kept else part.nbytes
            self._kept[name] = part
            self._kept.move_to_end(name)
        while self._bytes > self.limit:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes
        return torch.cat([found[name] for name in names])


def embed_over(tower: VisionTower, pixels_PK: Tensor, grids: Grids, team: ProcessGroup | None) -> Tensor:
    """Embeddings of all images on every rank of the team, each image embedded by one of them.

    A rank that gets none runs the tower on one cell of zeros, so that all make the same calls.
    """
    ranks = collectives.group_size(team)
    if ranks == 1:
        return tower(pixels_PK, grids)
    cell = tower.args.spatial_merge_size**2
    patches = [t * h * w for t, h, w in grids]
    shares = share_out(patches, ranks)
    own = shares[collectives.group_rank(team)]
    pieces = pixels_PK.split(patches)
    if own:
        mine_ND = tower(torch.cat([pieces[i] for i in own]), tuple(grids[i] for i in own))
    else:
        side = tower.args.spatial_merge_size
        mine_ND = tower(torch.zeros_like(pixels_PK[:cell]), ((1, side, side),))
    most = max(1, *(sum(patches[i] for i in share) // cell for share in shares))
    found_MD = collectives.gather_sum(F.pad(mine_ND, (0, 0, 0, most - mine_ND.shape[0])), team)
    starts = np.empty(len(grids), dtype=np.int64)
    for rank, share in enumerate(shares):
        starts[share] = rank * most + np.cumsum([0, *(patches[i] // cell for i in share)])[:-1]
    row_N = np.concatenate([start + np.arange(count // cell) for start, count in zip(starts, patches, strict=True)])
    return found_MD.index_select(0, torch.from_numpy(row_N).to(found_MD.device))
