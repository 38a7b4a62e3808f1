"""A tiny, randomly initialised Qwen2.5-VL (or Qwen2) checkpoint, written as the hub ships the real ones.

Owns shapes, names and initial values of the weights and the JSON files beside them; the tokenizer is tiny.tokenizer's.
Needs numpy only: the weights depend on nothing but the seed and the name of each tensor.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from launcher.roles.tiny import tokenizer

PATCH, TEMPORAL_PATCH, MERGE, CHANNELS = 14, 2, 2, 3


class ShapeError(Exception):
    """A model that cannot be built: the message names the sizes that do not fit."""


@dataclass(frozen=True)
class TinyModel:
    """Sizes of the model to make. The defaults are those of the quickstart task."""

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 256
    vocab: int = 512
    vision_depth: int = 2
    vision_hidden: int = 64
    vision_heads: int = 4
    vision_intermediate: int = 128
    full_attention: tuple[int, ...] = ()  # vision blocks without windows; empty = the last one
    text_only: bool = False
    tied: bool = True
    dtype: str = "float32"
    initializer_range: float = 0.05
    jitter: float = 0.0  # spread of biases and norm weights around 0 and 1; parity tests want it above 0
    rope_theta: float = 1e4
    max_positions: int = 32768
    min_pixels: int = 4 * 28 * 28
    max_pixels: int = 16384 * 28 * 28
    shards: int = 2
    seed: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def problems(self, tokens: int) -> list[str]:
        """What is wrong with these sizes, for a tokenizer of so many entries."""
        checks = {
            f"hidden {self.hidden} is not a multiple of heads {self.heads}": self.hidden % self.heads,
            f"head size {self.head_dim} is not a multiple of 4 of at least 8": self.head_dim % 4 or self.head_dim < 8,
            f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}": self.heads % self.kv_heads,
            f"vocab {self.vocab} is smaller than the tokenizer's {tokens} entries": self.vocab < tokens,
            f"vision_hidden {self.vision_hidden} is not a multiple of 4 x vision_heads {self.vision_heads}": (
                self.vision_hidden % (4 * self.vision_heads)
            ),
            f"max_pixels {self.max_pixels} is below min_pixels {self.min_pixels}": self.max_pixels < self.min_pixels,
            f"dtype {self.dtype} is neither float32 nor bfloat16": self.dtype not in ("float32", "bfloat16"),
            f"shards {self.shards} is less than 1": self.shards < 1,
        }
        return [text for text, wrong in checks.items() if wrong]


def write_checkpoint(directory: Path, model: TinyModel) -> None:
    """Writes every file of the checkpoint into `directory`, which is made where it does not exist.

    Raises ShapeError when the sizes do not fit together.
    """
    vocabulary, _, special = tokenizer.build()
    if problems := model.problems(len(vocabulary) + len(special)):
        raise ShapeError("; ".join(problems))
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.write(directory, max_length=model.max_positions)
    _write_json(directory / "config.json", config_json(model, special))
    ends = [special["<|im_end|>"], special["<|endoftext|>"]]
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": ends[1], "pad_token_id": ends[1], "do_sample": False, "eos_token_id": ends},
    )
    if not model.text_only:
        _write_json(directory / "preprocessor_config.json", preprocessor_json(model))
    _write_shards(directory, model)


def config_json(model: TinyModel, special: dict[str, int]) -> dict[str, object]:
    """The flat config.json of the hub's Qwen2.5-VL (of Qwen2 for a text-only model)."""
    text: dict[str, object] = {
        "architectures": ["Qwen2ForCausalLM" if model.text_only else "Qwen2_5_VLForConditionalGeneration"],
        "attention_dropout": 0.0,
        "bos_token_id": special["<|endoftext|>"],
        "eos_token_id": special["<|im_end|>"],
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "initializer_range": model.initializer_range,
        "intermediate_size": model.intermediate,
        "max_position_embeddings": model.max_positions,
        "max_window_layers": model.layers,
        "model_type": "qwen2" if model.text_only else "qwen2_5_vl",
        "num_attention_heads": model.heads,
        "num_hidden_layers": model.layers,
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": model.rope_theta,
        "sliding_window": model.max_positions,
        "tie_word_embeddings": model.tied,
        "torch_dtype": model.dtype,
        "transformers_version": "4.41.2",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": model.vocab,
    }
    if model.text_only:
        return text
    half = model.head_dim // 2
    time = half // 4
    height = (half - time) // 2
    return text | {
        "vision_start_token_id": special["<|vision_start|>"],
        "vision_end_token_id": special["<|vision_end|>"],
        "vision_token_id": special["<|vision_pad|>"],
        "image_token_id": special["<|image_pad|>"],
        "video_token_id": special["<|video_pad|>"],
        "rope_scaling": {"type": "mrope", "mrope_section": [time, height, half - time - height]},
        "vision_config": {
            "depth": model.vision_depth,
            "hidden_act": "silu",
            "hidden_size": model.vision_hidden,
            "intermediate_size": model.vision_intermediate,
            "num_heads": model.vision_heads,
            "in_chans": CHANNELS,
            "out_hidden_size": model.hidden,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "spatial_patch_size": PATCH,
            "window_size": 112,
            "fullatt_block_indexes": list(model.full_attention or (model.vision_depth - 1,)),
            "tokens_per_second": 2,
            "temporal_patch_size": TEMPORAL_PATCH,
        },
    }


def preprocessor_json(model: TinyModel) -> dict[str, object]:
    """The preprocessor_config.json of the hub's Qwen2.5-VL, with this model's pixel limits."""
    return {
        "min_pixels": model.min_pixels,
        "max_pixels": model.max_pixels,
        "patch_size": PATCH,
        "temporal_patch_size": TEMPORAL_PATCH,
        "merge_size": MERGE,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
    }


def tensor_shapes(model: TinyModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Hub name and shape of every tensor."""
    hidden, kv = model.hidden, model.kv_heads * model.head_dim
    yield "model.embed_tokens.weight", (model.vocab, hidden)
    for n in range(model.layers):
        at = f"model.layers.{n}"
        for name, rows in (("q_proj", hidden), ("k_proj", kv), ("v_proj", kv)):
            yield f"{at}.self_attn.{name}.weight", (rows, hidden)
            yield f"{at}.self_attn.{name}.bias", (rows,)
        yield f"{at}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{at}.mlp.gate_proj.weight", (model.intermediate, hidden)
        yield f"{at}.mlp.up_proj.weight", (model.intermediate, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, model.intermediate)
        yield f"{at}.input_layernorm.weight", (hidden,)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not model.tied:
        yield "lm_head.weight", (model.vocab, hidden)
    if not model.text_only:
        yield from _vision_shapes(model)


def _vision_shapes(model: TinyModel) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = model.vision_hidden, model.vision_intermediate
    merged = hidden * MERGE * MERGE
    yield "visual.patch_embed.proj.weight", (hidden, CHANNELS, TEMPORAL_PATCH, PATCH, PATCH)
    for n in range(model.vision_depth):
        at = f"visual.blocks.{n}"
        yield f"{at}.norm1.weight", (hidden,)
        yield f"{at}.norm2.weight", (hidden,)
        linears = (("attn.qkv", 3 * hidden, hidden), ("attn.proj", hidden, hidden), ("mlp.gate_proj", inner, hidden),
                   ("mlp.up_proj", inner, hidden), ("mlp.down_proj", hidden, inner))  # fmt: skip
        for name, rows, columns in linears:
            yield f"{at}.{name}.weight", (rows, columns)
            yield f"{at}.{name}.bias", (rows,)
    yield "visual.merger.ln_q.weight", (hidden,)
    for name, rows in (("mlp.0", merged), ("mlp.2", model.hidden)):
        yield f"visual.merger.{name}.weight", (rows, merged)
        yield f"visual.merger.{name}.bias", (rows,)


def initial_value(name: str, shape: tuple[int, ...], model: TinyModel) -> np.ndarray:
    """Initial float32 value of a tensor: normal for matrices, 1 for norms and 0 for biases (each ± jitter)."""
    generator = np.random.default_rng([model.seed, zlib.crc32(name.encode())])
    if len(shape) > 1:
        return (generator.standard_normal(shape) * model.initializer_range).astype(np.float32)
    centre = 0.0 if name.endswith(".bias") else 1.0
    return (centre + model.jitter * generator.standard_normal(shape)).astype(np.float32)


def _write_shards(directory: Path, model: TinyModel) -> None:
    width = 2 if model.dtype == "bfloat16" else 4
    shapes = list(tensor_shapes(model))
    total = sum(math.prod(shape) for _, shape in shapes) * width
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(model.shards)]
    done = 0
    for name, shape in shapes:
        # The middle of each tensor says in which share of the bytes it lies.
        size = math.prod(shape) * width
        shards[min(model.shards - 1, (2 * done + size) * model.shards // (2 * total))].append((name, shape))
        done += size
    shards = [shard for shard in shards if shard]
    weight_map: dict[str, str] = {}
    for n, shard in enumerate(shards, start=1):
        file = f"model-{n:05d}-of-{len(shards):05d}.safetensors"
        weight_map |= dict.fromkeys((name for name, _ in shard), file)
        with (directory / file).open("wb") as out:
            out.write(_safetensors_header(shard, width))
            for name, shape in shard:
                value = initial_value(name, shape, model)
                out.write(_bfloat16_bytes(value) if width == 2 else value.astype("<f4").tobytes())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(directory / "model.safetensors.index.json", index)


def _safetensors_header(shard: list[tuple[str, tuple[int, ...]]], width: int) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shard:
        start, end = end, end + math.prod(shape) * width
        header[name] = {"dtype": "BF16" if width == 2 else "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bfloat16_bytes(value: np.ndarray) -> bytes:
    """Rounds float32 to bfloat16, ties to even; numpy has no such type."""
    bits = value.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
