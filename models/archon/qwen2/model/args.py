"""Sizes and switches of a Qwen2, Qwen2.5 or Qwen2.5-VL checkpoint.

Owns the reading of config.json and generation_config.json in every layout that the hub and transformers write (flat or
nested, `rope_scaling` or `rope_parameters`, `in_chans` or `in_channels`); refuses by name what the model does not do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download


class ModelConfigError(ValueError):
    """A model's configuration is missing, incomplete, or asks for what is not built."""


@dataclass(frozen=True)
class VisionArgs:
    """Sizes of the vision tower."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    in_channels: int
    window_size: int
    fullatt_block_indexes: tuple[int, ...]
    tokens_per_second: float


@dataclass(frozen=True)
class Qwen2ModelArgs:
    """Everything that shapes the model; `path` is where its weights lie."""

    path: Path
    dtype: torch.dtype
    max_tokens_per_mb: int | None  # tokens of the longest stream that will be passed; None = no limit
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, int, int]
    tie_word_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    image_token_id: int | None
    video_token_id: int | None
    vision: VisionArgs | None

    @property
    def spatial_merge_size(self) -> int:
        return self.vision.spatial_merge_size if self.vision else 1

    @property
    def tokens_per_second(self) -> float:
        return self.vision.tokens_per_second if self.vision else 1.0

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, dtype: torch.dtype | str = torch.float32, max_tokens_per_mb: int | None = None
    ) -> Qwen2ModelArgs:
        """Reads a checkpoint directory, or a hub id that is in (or may be brought into) the hub's cache."""
        if isinstance(dtype, str):
            named = getattr(torch, dtype, None)
            if not isinstance(named, torch.dtype):
                raise ModelConfigError(f"dtype: {dtype!r} is no torch dtype")
            dtype = named
        directory = Path(path)
        if not directory.is_dir():
            directory = _cached(str(path))
        config = _read(directory / "config.json")
        generation = directory / "generation_config.json"
        return _parse(config, _read(generation) if generation.exists() else {}, directory, dtype, max_tokens_per_mb)


def _cached(hub_id: str) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"]))
    except Exception as error:
        raise ModelConfigError(
            f"{hub_id}: neither a directory nor a model of the hub's cache ({type(error).__name__}); "
            "run `python -m launcher prepare CONFIG` where there is internet, or give a directory"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ModelConfigError(f"{path}: no such file; a checkpoint directory holds config.json") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelConfigError(f"{path}: not a JSON object")
    return found


def _parse(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    path: Path,
    dtype: torch.dtype,
    max_tokens_per_mb: int | None,
) -> Qwen2ModelArgs:
    where = path / "config.json"
    text = _Fields({**config, **(config.get("text_config") or {})}, where)
    model_type = config.get("model_type")
    if model_type not in ("qwen2", "qwen2_5_vl"):
        raise ModelConfigError(f"{where}: model_type {model_type!r} is not built; qwen2 and qwen2_5_vl are")
    heads = text.integer("num_attention_heads")
    head_dim = text.values.get("head_dim") or text.integer("hidden_size") // heads
    theta, section = _rope(text, head_dim)
    _refuse(text)
    is_vlm = model_type == "qwen2_5_vl"
    tied = bool(config.get("tie_word_embeddings")) or bool((config.get("text_config") or {}).get("tie_word_embeddings"))
    return Qwen2ModelArgs(
        path=path,
        dtype=dtype,
        max_tokens_per_mb=max_tokens_per_mb,
        model_type=model_type,
        vocab_size=text.integer("vocab_size"),
        hidden_size=text.integer("hidden_size"),
        intermediate_size=text.integer("intermediate_size"),
        num_hidden_layers=text.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=text.values.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=float(text.get("rms_norm_eps")),
        rope_theta=theta,
        mrope_section=section,
        tie_word_embeddings=tied,
        max_position_embeddings=text.integer("max_position_embeddings"),
        eos_token_ids=_eos(generation, text.values),
        image_token_id=text.integer("image_token_id") if is_vlm else None,
        video_token_id=text.integer("video_token_id") if is_vlm else None,
        vision=_vision(config.get("vision_config") or {}, where) if is_vlm else None,
    )


class _Fields:
    """Fields of a configuration; a missing one is an error that names it (defaults differ between releases)."""

    def __init__(self, values: Mapping[str, Any], where: Path, prefix: str = "") -> None:
        self.values, self.where, self.prefix = values, where, prefix

    def get(self, *names: str) -> Any:
        for name in names:
            if self.values.get(name) is not None:
                return self.values[name]
        raise ModelConfigError(f"{self.where}: {self.prefix}{' or '.join(names)} is missing")

    def integer(self, *names: str) -> int:
        value = self.get(*names)
        if isinstance(value, (list, tuple)) and len(set(value)) == 1:
            value = value[0]  # transformers allows patch_size: [14, 14]
        if not isinstance(value, int) or value < 0:
            raise ModelConfigError(f"{self.where}: {self.prefix}{names[0]} is {value!r}, not a whole number")
        return value


def _rope(text: _Fields, head_dim: int) -> tuple[float, tuple[int, int, int]]:
    scaling = text.values.get("rope_parameters") or text.values.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise ModelConfigError(f"{text.where}: rope type {kind!r} is not built; default and mrope are")
    theta = scaling.get("rope_theta", text.values.get("rope_theta"))
    if theta is None:
        raise ModelConfigError(f"{text.where}: rope_theta is missing")
    section = tuple(scaling.get("mrope_section") or (head_dim // 2, 0, 0))
    if len(section) != 3 or sum(section) != head_dim // 2:
        raise ModelConfigError(
            f"{text.where}: mrope_section {list(section)} does not add up to head_dim/2 = {head_dim // 2}"
        )
    return float(theta), (section[0], section[1], section[2])


def _refuse(text: _Fields) -> None:
    built: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "use_sliding_window": (False,),
        "attention_dropout": (0, 0.0),
    }
    for name, allowed in built.items():
        value = text.values.get(name)
        if value is not None and value not in allowed:
            raise ModelConfigError(f"{text.where}: {name} = {value!r} is not built; {allowed[0]!r} is")
    heads, kv = text.integer("num_attention_heads"), text.values.get("num_key_value_heads")
    if kv and heads % kv:
        raise ModelConfigError(f"{text.where}: {heads} attention heads do not divide among {kv} key/value heads")


def _vision(config: Mapping[str, Any], where: Path) -> VisionArgs:
    vision = _Fields(config, where, "vision_config.")
    if vision.values.get("hidden_act", "silu") != "silu":
        raise ModelConfigError(f"{where}: vision_config.hidden_act = {vision.values['hidden_act']!r} is not built")
    return VisionArgs(
        depth=vision.integer("depth"),
        hidden_size=vision.integer("hidden_size"),
        intermediate_size=vision.integer("intermediate_size"),
        num_heads=vision.integer("num_heads"),
        out_hidden_size=vision.integer("out_hidden_size"),
        patch_size=vision.integer("patch_size", "spatial_patch_size"),
        temporal_patch_size=vision.integer("temporal_patch_size"),
        spatial_merge_size=vision.integer("spatial_merge_size"),
        in_channels=vision.integer("in_channels", "in_chans"),
        window_size=vision.integer("window_size"),
        fullatt_block_indexes=tuple(vision.get("fullatt_block_indexes")),
        tokens_per_second=float(vision.get("tokens_per_second")),
    )


def _eos(generation: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for source in (generation.get("eos_token_id"), config.get("eos_token_id")):
        for token in source if isinstance(source, list) else [source]:
            if token is not None and token not in ids:
                ids.append(token)
    return tuple(ids)
