"""Qwen2 and Qwen2.5 text models and Qwen2.5-VL, as one hand-written model over packed documents.

Owns the decoder, the fusing of image embeddings and the forward protocol of core.ops.packed; communicates only through
the layers of core.parallel. Names of modules are the hub's, so names of parameters need no mapping.
Shapes: T tokens of the stream, D hidden, H heads, d head width, M placeholders, N merged image cells, R rows asked for.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from core.ops.attention import attention
from core.ops.packed import KVCache, Output, PackedBatch
from core.ops.rope import PlaceholderError, rotate
from core.parallel.layers import (
    ColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    column_parallel,
)
from models.archon.qwen2.model.args import Qwen2ModelArgs
from models.archon.qwen2.model.rope import text_tables
from models.archon.qwen2.model.state_dict_adapter import Qwen2StateDictAdapter
from models.archon.qwen2.model.vision import VisionTower


class StreamError(ValueError):
    """A packed batch is longer than the model was built for."""


class Attention(nn.Module):
    def __init__(self, args: Qwen2ModelArgs, layer: int, tp: ProcessGroup | None) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, args.head_dim
        heads, kv, dtype = args.num_attention_heads, args.num_key_value_heads, args.dtype
        width, query, key = args.hidden_size, heads * args.head_dim, kv * args.head_dim
        self.q_proj = ColumnParallelLinear(width, query, blocks=heads, tp=tp, dtype=dtype)
        self.k_proj = ColumnParallelLinear(width, key, blocks=kv, tp=tp, dtype=dtype)
        self.v_proj = ColumnParallelLinear(width, key, blocks=kv, tp=tp, dtype=dtype)
        self.o_proj = RowParallelLinear(query, width, blocks=heads, tp=tp, dtype=dtype)

    def forward(
        self, x_TD: Tensor, cos: Tensor, sin: Tensor, cu_seqlens: Tensor, max_seqlen: int, kv_cache: KVCache | None
    ) -> Tensor:
        projected = column_parallel(x_TD, self.q_proj, self.k_proj, self.v_proj)
        q_THd, k_THd, v_THd = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)
        q_THd, k_THd = rotate(q_THd, cos, sin), rotate(k_THd, cos, sin)
        if kv_cache is None:
            o_THd = attention(q_THd, k_THd, v_THd, cu_seqlens, max_seqlen, causal=True)
        else:
            o_THd = kv_cache.attend(self.layer, q_THd, k_THd, v_THd)
        return self.o_proj(o_THd.flatten(1))


class MLP(nn.Module):
    def __init__(self, args: Qwen2ModelArgs, tp: ProcessGroup | None) -> None:
        super().__init__()
        width, inner, dtype = args.hidden_size, args.intermediate_size, args.dtype
        self.gate_proj = ColumnParallelLinear(width, inner, bias=False, tp=tp, dtype=dtype)
        self.up_proj = ColumnParallelLinear(width, inner, bias=False, tp=tp, dtype=dtype)
        self.down_proj = RowParallelLinear(inner, width, tp=tp, dtype=dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        gate, up = column_parallel(x_TD, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    def __init__(self, args: Qwen2ModelArgs, layer: int, tp: ProcessGroup | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps, dtype=args.dtype)
        self.self_attn = Attention(args, layer, tp)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps, dtype=args.dtype)
        self.mlp = MLP(args, tp)

    def forward(
        self,
        x_TD: Tensor,
        cos: Tensor,
        sin: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        kv_cache: KVCache | None = None,
    ) -> Tensor:
        x_TD = x_TD + self.self_attn(self.input_layernorm(x_TD), cos, sin, cu_seqlens, max_seqlen, kv_cache)
        return x_TD + self.mlp(self.post_attention_layernorm(x_TD))


class Decoder(nn.Module):
    """Holds the hub's `model.*`; the forward is Qwen2Model's."""

    def __init__(self, args: Qwen2ModelArgs, tp: ProcessGroup | None) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(args.vocab_size, args.hidden_size, tp=tp, dtype=args.dtype)
        self.layers = nn.ModuleList(DecoderLayer(args, i, tp) for i in range(args.num_hidden_layers))
        self.norm = RMSNorm(args.hidden_size, args.rms_norm_eps, dtype=args.dtype)


class Qwen2Model(nn.Module):
    """A causal language model, with a vision tower where the checkpoint has one."""

    def __init__(self, args: Qwen2ModelArgs, *, tp: ProcessGroup | None = None, load: bool = True) -> None:
        """Builds the model and loads the weights of `args.path`; `load=False` leaves parameters empty."""
        super().__init__()
        self.args = args
        self.visual = VisionTower(args.vision, args.dtype) if args.vision else None
        self.model = Decoder(args, tp)
        self.lm_head = VocabParallelHead(args.hidden_size, args.vocab_size, tp=tp, dtype=args.dtype)
        self.tie()
        if load:
            Qwen2StateDictAdapter(args).load_into(self, args.path)

    @classmethod
    def on_meta(cls, args: Qwen2ModelArgs, *, tp: ProcessGroup | None = None) -> Qwen2Model:
        """The model without storage; after `to_empty` call `tie` before sharding or loading."""
        with torch.device("meta"):
            return cls(args, tp=tp, load=False)

    def tie(self) -> None:
        """Makes head and embedding one parameter where the checkpoint ties them (`to_empty` parts them)."""
        if self.args.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def fsdp_units(self) -> list[list[nn.Module]]:
        """The tower, each decoder layer, and last what may share the tied weight: embedding, norm and head."""
        tower: list[list[nn.Module]] = [[self.visual]] if self.visual is not None else []
        layers: list[list[nn.Module]] = [[layer] for layer in self.model.layers]
        return [*tower, *layers, [self.model.embed_tokens, self.model.norm, self.lm_head]]

    def forward(self, packed: PackedBatch, kv_cache: KVCache | None = None) -> Output:
        limit = self.args.max_tokens_per_mb
        if limit is not None and packed.input_ids_T.numel() > limit:
            raise StreamError(f"{packed.input_ids_T.numel()} tokens in a batch, max_tokens_per_mb is {limit}")
        x_TD = self.model.embed_tokens(packed.input_ids_T)
        if packed.pixel_values_PK is not None:
            x_TD = self._with_images(x_TD, packed, packed.pixel_values_PK)
        cos, sin = text_tables(self.args, packed.position_ids_3T, x_TD.dtype)
        for layer in self.model.layers:
            x_TD = layer(x_TD, cos, sin, packed.cu_seqlens, packed.max_seqlen, kv_cache)
        scoring = packed.scoring
        rows = packed.logit_rows_R if scoring is None else scoring.row_R
        x_RD = x_TD if rows is None else x_TD.index_select(0, rows)
        found = self.lm_head(self.model.norm(x_RD), scoring)
        return Output(found, None) if scoring is None else Output(None, found)

    def _with_images(self, x_TD: Tensor, packed: PackedBatch, pixels_PK: Tensor) -> Tensor:
        """Puts the tower's embeddings at the placeholders; a batch without any still depends on the tower."""
        if self.visual is None:
            raise PlaceholderError("the batch has pixel values and the model no vision tower")
        embeds_ND = self.visual(pixels_PK, packed.grid_thw).to(x_TD.dtype)
        ids_T, row_M = packed.input_ids_T, packed.visual_row_M
        image, video = self.args.image_token_id, self.args.video_token_id
        assert image is not None and video is not None  # args with a tower have both
        here_T = torch.eq(ids_T, image) | torch.eq(ids_T, video)
        # with rows given their number is known on the host: no wait for the device
        wanted = int(here_T.sum()) if row_M is None or not ids_T.is_cuda else row_M.numel()
        if wanted == 0:
            return x_TD + 0.0 * embeds_ND.sum()
        rows_MD = embeds_ND if row_M is None else embeds_ND.index_select(0, row_M)
        if rows_MD.shape[0] != wanted:
            raise PlaceholderError(f"{wanted} placeholder tokens in the batch, {rows_MD.shape[0]} image embeddings")
        return x_TD.index_copy(0, torch.nonzero_static(here_T, size=wanted).squeeze(1), rows_MD)
