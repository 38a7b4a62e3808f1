"""Qwen2 and Qwen2.5 text models and Qwen2.5-VL, as one hand-written model over packed documents.

Owns the decoder, the fusing of image embeddings and the forward protocol of core.ops.packed; communicates only through
the layers of core.parallel. Names of modules are the hub's, so names of parameters need no mapping.
Shapes: T tokens of the stream, N of a cp rank, S of a tp rank outside regions (one rank: T = N = S), D hidden, H heads,
d head width, M placeholders, E embeddings of images, R rows asked for.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from core.ops.packed import KVCache, Output, PackedBatch
from core.ops.rope import PlaceholderError, rotate
from core.parallel.context import Stream
from core.parallel.layers import (
    ColumnParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    column_parallel,
    replicate,
)
from core.parallel.mesh import Team
from models.archon.qwen2.model.args import Qwen2ModelArgs
from models.archon.qwen2.model.rope import text_tables
from models.archon.qwen2.model.state_dict_adapter import Qwen2StateDictAdapter
from models.archon.qwen2.model.vision import Features, VisionTower, embed_over


class StreamError(ValueError):
    """A packed batch is longer than the model was built for."""


class Attention(nn.Module):
    def __init__(self, args: Qwen2ModelArgs, layer: int, tp: DeviceMesh | None) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, args.head_dim
        heads, kv, dtype = args.num_attention_heads, args.num_key_value_heads, args.dtype
        width, query, key = args.hidden_size, heads * args.head_dim, kv * args.head_dim
        self.q_proj = ColumnParallelLinear(width, query, blocks=heads, tp=tp, dtype=dtype)
        self.k_proj = ColumnParallelLinear(width, key, blocks=kv, tp=tp, dtype=dtype)
        self.v_proj = ColumnParallelLinear(width, key, blocks=kv, tp=tp, dtype=dtype)
        self.o_proj = RowParallelLinear(query, width, blocks=heads, tp=tp, dtype=dtype)

    def forward(self, x_SD: Tensor, cos: Tensor, sin: Tensor, stream: Stream, kv_cache: KVCache | None) -> Tensor:
        projected = column_parallel(x_SD, self.q_proj, self.k_proj, self.v_proj)
        q_NHd, k_NHd, v_NHd = (x.unflatten(-1, (-1, self.head_dim)) for x in projected)
        q_NHd, k_NHd = rotate(q_NHd, cos, sin), rotate(k_NHd, cos, sin)
        if kv_cache is None:
            o_NHd = stream.attend(q_NHd, k_NHd, v_NHd)
        else:
            o_NHd = kv_cache.attend(self.layer, q_NHd, k_NHd, v_NHd)
        return self.o_proj(o_NHd.flatten(1))


class MLP(nn.Module):
    def __init__(self, args: Qwen2ModelArgs, tp: DeviceMesh | None) -> None:
        super().__init__()
        width, inner, dtype = args.hidden_size, args.intermediate_size, args.dtype
        self.gate_proj = ColumnParallelLinear(width, inner, bias=False, tp=tp, dtype=dtype)
        self.up_proj = ColumnParallelLinear(width, inner, bias=False, tp=tp, dtype=dtype)
        self.down_proj = RowParallelLinear(inner, width, tp=tp, dtype=dtype)

    def forward(self, x_SD: Tensor) -> Tensor:
        gate, up = column_parallel(x_SD, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    def __init__(self, args: Qwen2ModelArgs, layer: int, tp: DeviceMesh | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps, dtype=args.dtype)
        self.self_attn = Attention(args, layer, tp)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps, dtype=args.dtype)
        self.mlp = MLP(args, tp)

    def forward(
        self, x_SD: Tensor, cos: Tensor, sin: Tensor, stream: Stream, kv_cache: KVCache | None = None
    ) -> Tensor:
        x_SD = x_SD + self.self_attn(self.input_layernorm(x_SD), cos, sin, stream, kv_cache)
        return x_SD + self.mlp(self.post_attention_layernorm(x_SD))


class Decoder(nn.Module):
    """Holds the hub's `model.*`; the forward is Qwen2Model's."""

    def __init__(self, args: Qwen2ModelArgs, tp: DeviceMesh | None) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(args.vocab_size, args.hidden_size, tp=tp, dtype=args.dtype)
        self.layers = nn.ModuleList(DecoderLayer(args, i, tp) for i in range(args.num_hidden_layers))
        self.norm = RMSNorm(args.hidden_size, args.rms_norm_eps, dtype=args.dtype)


class Qwen2Model(nn.Module):
    """A causal language model, with a vision tower where the checkpoint has one."""

    def __init__(
        self, args: Qwen2ModelArgs, *, team: Team | None = None, cp_style: str = "ulysses", load: bool = True
    ) -> None:
        """Builds the model and loads the weights of `args.path`; `load=False` leaves parameters empty."""
        super().__init__()
        self.args, self.team, self.cp_style = args, team or Team(), cp_style
        tp = self.team.tp
        self.visual = VisionTower(args.vision, args.dtype) if args.vision else None
        self.features: Features | None = None  # set where the tower is frozen
        self.model = Decoder(args, tp)
        self.lm_head = VocabParallelHead(args.hidden_size, args.vocab_size, tp=tp, dtype=args.dtype)
        replicate(self, tp)
        self.tie()
        if load:
            Qwen2StateDictAdapter(args).load_into(self, args.path)

    @classmethod
    def on_meta(cls, args: Qwen2ModelArgs, *, team: Team | None = None, cp_style: str = "ulysses") -> Qwen2Model:
        """The model without storage; after `to_empty` call `tie` before loading."""
        with torch.device("meta"):
            return cls(args, team=team, cp_style=cp_style, load=False)

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
        stream = Stream(packed, self.team, self.cp_style)
        x_SD = self.model.embed_tokens(stream.take(packed.input_ids_T))
        if packed.pixel_values_PK is not None:
            x_SD = self._with_images(x_SD, packed, packed.pixel_values_PK, stream)
        cos, sin = text_tables(self.args, stream.take(packed.position_ids_3T, dim=1), x_SD.dtype)
        for layer in self.model.layers:
            x_SD = layer(x_SD, cos, sin, stream, kv_cache)
        scoring = packed.scoring
        asked = stream.asked(packed.logit_rows_R if scoring is None else scoring.row_R)
        hidden_RD = asked.hidden(self.model.norm(x_SD))
        return asked.output(self.lm_head(hidden_RD, asked.scoring(scoring)))

    def _with_images(self, x_SD: Tensor, packed: PackedBatch, pixels_PK: Tensor, stream: Stream) -> Tensor:
        """Puts the tower's embeddings at the placeholders; a batch without any still depends on the tower."""
        if self.visual is None:
            raise PlaceholderError("the batch has pixel values and the model no vision tower")
        embed = partial(embed_over, self.visual, team=self.team.all)
        if self.features is not None and packed.image_names:
            embeds_ED = self.features.of(packed.image_names, pixels_PK, packed.grid_thw, embed).to(x_SD.dtype)
        else:
            embeds_ED = embed(pixels_PK, packed.grid_thw).to(x_SD.dtype)
        row_S = stream.own_rows(stream.take(self._visual_rows(packed, embeds_ED.shape[0])))
        # text rows read some embedding too, each another one: all at one row would queue up in backward
        spread_S = torch.arange(row_S.numel(), device=row_S.device) % embeds_ED.shape[0]
        seen_SD = embeds_ED.index_select(0, torch.where(row_S < 0, spread_S, row_S))
        return torch.where(row_S[:, None] < 0, x_SD, seen_SD)

    def _visual_rows(self, packed: PackedBatch, embeddings: int) -> Tensor:
        """For every token of the stream the row of its embedding in the tower's output, -1 for text."""
        ids_T, row_M = packed.input_ids_T, packed.visual_row_M
        image, video = self.args.image_token_id, self.args.video_token_id
        assert image is not None and video is not None  # args with a tower have both
        here_T = torch.eq(ids_T, image) | torch.eq(ids_T, video)
        # with rows given their number is known on the host: no wait for the device
        wanted = int(here_T.sum()) if row_M is None or not ids_T.is_cuda else row_M.numel()
        if row_M is None:
            row_M = torch.arange(embeddings if wanted else 0, device=ids_T.device)
        if row_M.numel() != wanted:
            raise PlaceholderError(f"{wanted} placeholder tokens in the batch, {row_M.numel()} image embeddings")
        at_M = torch.nonzero_static(here_T, size=wanted).squeeze(1)
        return torch.full_like(ids_T, -1).index_copy(0, at_M, row_M)
