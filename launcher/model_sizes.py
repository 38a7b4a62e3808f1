"""Sizes of a model by its name or its config.json: what planning knows of it, without its weights.

Owns the published sizes of Qwen2, Qwen2.5 and Qwen2.5-VL, the reading of config.json (flat and nested), the count of
parameters, and the check that a local checkpoint is whole. It loads no tensor; models.archon builds the model.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config.errors import UserError
from core.data.hub import HubError, resolve


class ModelError(UserError):
    """A model that cannot be planned: unknown, not supported, or its directory is not whole."""


@dataclass(frozen=True)
class VisionShape:
    depth: int
    hidden: int
    heads: int
    intermediate: int
    out_hidden: int
    patch: int = 14
    temporal_patch: int = 2
    merge: int = 2
    channels: int = 3

    @property
    def block_params(self) -> int:
        h, i = self.hidden, self.intermediate
        return 2 * h + (3 * h * h + 3 * h) + (h * h + h) + 2 * (h * i + i) + (i * h + h)

    @property
    def params(self) -> int:
        patch = self.hidden * self.channels * self.temporal_patch * self.patch**2
        merged = self.hidden * self.merge**2
        merger = self.hidden + merged * merged + merged + merged * self.out_hidden + self.out_hidden
        return patch + self.depth * self.block_params + merger


@dataclass(frozen=True)
class ModelShape:
    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    vision: VisionShape | None = None
    max_positions: int | None = None
    min_pixels: int | None = None  # of preprocessor_config.json
    max_pixels: int | None = None
    source: str = "carried"  # or the directory that was read

    @property
    def layer_params(self) -> int:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * (q + 2 * kv) + q + 2 * kv + q * self.hidden
        return attention + 3 * self.hidden * self.intermediate + 2 * self.hidden

    @property
    def ends_params(self) -> int:
        """Embedding, final norm and head: the unit that stays gathered."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def text_params(self) -> int:
        return self.ends_params + self.layers * self.layer_params

    @property
    def params(self) -> int:
        return self.text_params + (self.vision.params if self.vision else 0)

    def image_tokens(self, pixels: int) -> int:
        """Placeholders of the largest image that is resized to at most `pixels`."""
        if self.vision is None:
            return 0
        return pixels // (self.vision.patch * self.vision.merge) ** 2


# hub config.json of the named checkpoints: hidden, layers, heads, kv heads, intermediate, vocabulary rows, tied head
_TEXT = {
    "0.5B": (896, 24, 14, 2, 4864, 151936, True),
    "1.5B": (1536, 28, 12, 2, 8960, 151936, True),
    "3B": (2048, 36, 16, 2, 11008, 151936, True),
    "7B": (3584, 28, 28, 4, 18944, 152064, False),
    "14B": (5120, 48, 40, 8, 13824, 152064, False),
    "32B": (5120, 64, 40, 8, 27648, 152064, False),
    "72B": (8192, 80, 64, 8, 29568, 152064, False),
}
_FAMILIES = {
    "Qwen2": ("0.5B", "1.5B", "7B", "72B"),
    "Qwen2.5": ("0.5B", "1.5B", "3B", "7B", "14B", "32B", "72B"),
    "Qwen2.5-VL": ("3B", "7B", "32B", "72B"),
}
_VISION_INTERMEDIATE = {"3B": 3420, "7B": 3420, "32B": 3456, "72B": 3456}
_NAME = re.compile(r"(Qwen2(?:\.5)?)(-VL)?(?:-Math|-Coder)?-(\d+(?:\.\d+)?B)(-Instruct|-Base)?", re.IGNORECASE)
_SUPPORTED = ("qwen2", "qwen2_5_vl", "qwen2_5_vl_text")
_VL_MAX_POSITIONS, _VL_MIN_PIXELS, _VL_MAX_PIXELS = 128_000, 3136, 12_845_056


def carried(path: str) -> ModelShape | None:
    """The published sizes of a hub id, or None for a name that is not carried."""
    match = _NAME.fullmatch(path.rstrip("/").rsplit("/", 1)[-1])
    if not match:
        return None
    is_vl, size = bool(match.group(2)), match.group(3).upper()
    family = match.group(1).capitalize() + ("-VL" if is_vl else "")
    if size not in _FAMILIES.get(family, ()):
        return None
    hidden, layers, heads, kv_heads, intermediate, vocab, tied = _TEXT[size]
    return ModelShape(
        name=path,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate=intermediate,
        vocab=vocab,
        tied=tied,
        vision=VisionShape(32, 1280, 16, _VISION_INTERMEDIATE[size], hidden) if is_vl else None,
        max_positions=_VL_MAX_POSITIONS if is_vl else None,
        min_pixels=_VL_MIN_PIXELS if is_vl else None,
        max_pixels=_VL_MAX_PIXELS if is_vl else None,
    )


def local_directory(path: str, cache: Path) -> Path | None:
    """Where a model lies on this machine: the directory itself, or its snapshot in a cache."""
    try:
        place = resolve(path, cache=cache, kind="model")
    except HubError:
        return None
    return place if place.is_dir() else None


def shape_of(path: str, cache: Path) -> ModelShape:
    """The sizes of a model: from its config.json where it lies here, else the carried ones."""
    if not path:
        raise ModelError("no model is named: set it to a hub id or a local directory")
    directory = local_directory(path, cache)
    if directory is not None:
        return read_shape(directory, name=path)
    shape = carried(path)
    if shape is None:
        known = "; ".join(f"{family} {', '.join(sizes)}" for family, sizes in _FAMILIES.items())
        raise ModelError(
            f"{path!r} is no directory here, is not in {cache}, and its sizes are not carried "
            f"(carried: {known}); run prepare first, or name a local directory"
        )
    return shape


def read_shape(directory: Path, name: str | None = None) -> ModelShape:
    """Reads config.json (the hub's flat layout, or text_config inside) and preprocessor_config.json."""
    raw = _read_json(directory / "config.json")
    text = {**raw, **(raw.get("text_config") or {})}
    kind = raw.get("model_type")
    if kind not in _SUPPORTED:
        known = "there are qwen2 and qwen2_5_vl"
        raise ModelError(f"{directory / 'config.json'}: model_type {kind!r} is not supported; {known}")

    def need(key: str) -> int:
        value = text.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{directory / 'config.json'}: {key} is {value!r}; a positive integer is expected")
        return value

    hidden, heads = need("hidden_size"), need("num_attention_heads")
    if hidden % heads and "head_dim" not in text:
        raise ModelError(f"{directory / 'config.json'}: hidden_size {hidden} is not a multiple of {heads} heads")
    limits = _pixel_limits(directory) if kind != "qwen2" else (None, None)
    return ModelShape(
        name=name or str(directory),
        hidden=hidden,
        layers=need("num_hidden_layers"),
        heads=heads,
        kv_heads=need("num_key_value_heads"),
        head_dim=text.get("head_dim") or hidden // heads,
        intermediate=need("intermediate_size"),
        vocab=need("vocab_size"),
        tied=bool(raw.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        vision=_vision(directory, raw, hidden),
        max_positions=text.get("max_position_embeddings"),
        min_pixels=limits[0],
        max_pixels=limits[1],
        source=str(directory),
    )


def _vision(directory: Path, raw: dict[str, Any], hidden: int) -> VisionShape | None:
    fields = raw.get("vision_config")
    if raw.get("model_type") == "qwen2" or not fields:
        return None
    try:
        return VisionShape(
            depth=int(fields["depth"]),
            hidden=int(fields["hidden_size"]),
            heads=int(fields["num_heads"]),
            intermediate=int(fields["intermediate_size"]),
            out_hidden=int(fields.get("out_hidden_size", hidden)),
            patch=int(fields.get("patch_size", 14)),
            temporal_patch=int(fields.get("temporal_patch_size", 2)),
            merge=int(fields.get("spatial_merge_size", 2)),
            channels=int(fields.get("in_chans", fields.get("in_channels", 3))),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{directory / 'config.json'}: vision_config: {error} is missing or no number") from error


def _pixel_limits(directory: Path) -> tuple[int | None, int | None]:
    path = directory / "preprocessor_config.json"
    if not path.is_file():
        return None, None
    raw = _read_json(path)
    size = raw.get("size") or {}
    return raw.get("min_pixels", size.get("shortest_edge")), raw.get("max_pixels", size.get("longest_edge"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}; the directory of a checkpoint holds this file") from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: an object is expected")
    return value


def checkpoint_problems(directory: Path) -> list[str]:
    """What is missing or cut short in a checkpoint's weights and tokenizer; empty when it is whole."""
    index = directory / "model.safetensors.index.json"
    problems = []
    if index.is_file():
        try:
            shards = sorted(set(_read_json(index)["weight_map"].values()))
        except (ModelError, KeyError, AttributeError, TypeError) as error:
            return [f"{index}: weight_map cannot be read ({error})"]
    else:
        shards = sorted(path.name for path in directory.glob("*.safetensors"))
        if not shards:
            problems.append(f"{directory}: no model.safetensors and no model.safetensors.index.json")
    problems += [problem for shard in shards if (problem := _shard_problem(directory / shard, index))]
    if not (directory / "tokenizer.json").is_file():
        problems.append(f"{directory}: no tokenizer.json")
    return problems


def _shard_problem(path: Path, index: Path) -> str | None:
    if not path.is_file():
        return f"{path}: this shard is missing; {index.name} names it"
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > size - 8:
            return f"{path}: not a safetensors file, or cut short ({size} bytes; a Git LFS pointer?)"
        try:
            header = json.loads(file.read(length))
            end = max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return f"{path}: its safetensors header cannot be read"
    if size != 8 + length + end:
        return f"{path}: {size} bytes, its header says {8 + length + end}; copy this shard again"
    return None
