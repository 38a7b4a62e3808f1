"""Forward and backward of a 3B-shaped Qwen2.5-VL on one GPU, ours beside transformers (sdpa), in one run.

    python bench/train_step.py [--documents 8 --tokens 2048] [--tiny]

Random weights, one 448×448 image a document, every token trained. Rows of ours: weights in bf16 as transformers has
them; float32 masters under FSDP, which is what the trainer runs; and a group of 8 answers to one image. `--tiny` is the
same program on a small model and a CPU, to see that it runs. Needs neither pydantic nor omegaconf.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from core.engine.documents import Document, TokenRules, pack_documents
from core.ops.packed import PackedBatch
from core.parallel.mesh import Degrees, build_mesh, join
from models.archon.qwen2.infra.parallelize import parallelize
from models.archon.registry import family_of

IMAGE, VIDEO, START, END = 655, 656, 652, 653  # as in the published file, less 151,000: any small vocabulary has them
SHAPE: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "max_position_embeddings": 128000,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "eos_token_id": 645,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "in_channels": 3,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
    },
}
SIDE = 448
SPREAD = 0.02


def shape(tiny: bool) -> dict[str, Any]:
    if not tiny:
        return SHAPE
    small = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {**SHAPE["vision_config"], "depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2}
    vision |= {"out_hidden_size": 256, "fullatt_block_indexes": [1]}
    return {**SHAPE, **small, "vocab_size": 2048, "num_key_value_heads": 1, "vision_config": vision}


def write_config(folder: Path, tiny: bool) -> Path:
    (folder / "config.json").write_text(json.dumps(shape(tiny)))
    return folder


def random_weights(model: nn.Module, args: Any) -> None:
    """The same weights on every layout: each tensor drawn whole from its own seed, then cut."""
    adapter = family_of(args.path).adapter(args)
    device = next(model.parameters()).device

    def drawn() -> Iterator[tuple[str, Tensor]]:
        for number, (name, parameter) in enumerate(adapter.tensors(model)):
            generator = torch.Generator(device).manual_seed(number)
            noise = torch.randn(parameter.shape, generator=generator, device=device) * SPREAD
            # in bf16 exactly, so that a float32 reference has the same weights
            yield name, ((1 if "norm" in name or "ln_q" in name else 0) + noise).bfloat16().float()

    adapter.load_tensors(model, drawn())


def documents(
    count: int, tokens: int, *, images: int, completion: int | None = None
) -> tuple[list[Document], dict[str, np.ndarray]]:
    """Documents of equal length that start with one of `images` pictures; `completion`: tokens scored at the end."""
    rng = np.random.default_rng(0)
    pixels = {f"image-{i}": rng.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8) for i in range(images)}
    grid = (1, SIDE // 14, SIDE // 14)
    found = []
    for number in range(count):
        cells = grid[1] * grid[2] // 4
        text = rng.integers(1000, 2000, tokens - cells - 3)
        ids = np.concatenate([[1], [START], [IMAGE] * cells, [END], text]).astype(np.int64)
        prompt = 1 if completion is None else tokens - completion
        found.append(
            Document(f"{number}", ids, prompt, ((f"image-{number % images}", grid),), f"group {number % images}")
        )
    return found, pixels


RULES = TokenRules(IMAGE, VIDEO, 2, 2.0)


def actor(*, checkpointing: bool, dtype: str = "bfloat16", compiled: bool = True) -> SimpleNamespace:
    archon = SimpleNamespace(
        ac_mode="full", selective_ac_option="op", reshard_after_forward_policy="default", enable_compile=compiled
    )
    return SimpleNamespace(
        freeze_vision=False,
        gradient_checkpointing=checkpointing,
        dtype=dtype,
        grad_reduce_dtype="float32",
        archon=archon,
    )


def ours(folder: Path, device: torch.device, *, checkpointing: bool, masters: bool) -> nn.Module:
    family = family_of(folder)
    args = family.args.from_pretrained(folder, dtype=torch.float32 if masters else torch.bfloat16)
    mesh = build_mesh(Degrees(), rank=0, device=device)
    if not masters:
        mesh = SimpleNamespace(fsdp=None, device=device, size=1, team=mesh.team)
    model = family.model.on_meta(args)
    parallelize(model, mesh, actor(checkpointing=checkpointing))
    model.to_empty(device=device)
    model.tie()
    random_weights(model, args)
    return model


def step_of_ours(model: nn.Module, batch: PackedBatch) -> Callable[[], Tensor]:
    def step() -> Tensor:
        scores = model(batch).scores
        loss = -scores.logp_R.mean()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss.detach()

    return step


def transformers_model(folder: Path, device: torch.device, checkpointing: bool) -> nn.Module:
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = Qwen2_5_VLForConditionalGeneration._from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name or "ln_q" in name else 0.0, SPREAD)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def step_of_transformers(model: nn.Module, batch: PackedBatch, count: int) -> Callable[[], Tensor]:
    ids = batch.input_ids_T.view(count, -1)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": batch.pixel_values_PK.to(torch.bfloat16),
        "image_grid_thw": torch.tensor(batch.grid_thw, device=ids.device),
        "mm_token_type_ids": (ids == IMAGE).int(),
        "labels": ids,
    }

    def step() -> Tensor:
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def measure(
    name: str, make: Callable[[], Callable[[], Tensor]], tokens: int, device: torch.device, repeats: int
) -> dict[str, Any]:
    """Median seconds of a step after warming up, and the peak memory; an error is a row too."""
    cuda = device.type == "cuda"
    wait: Callable[[], None] = torch.cuda.synchronize if cuda else (lambda: None)
    try:
        started = time.perf_counter()
        step = make()
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            loss = step()
        wait()
        warm = time.perf_counter() - started
        secs = []
        for _ in range(repeats):
            wait()
            started = time.perf_counter()
            loss = step()
            wait()
            secs.append(time.perf_counter() - started)
        peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
        middle = statistics.median(secs)
        row = {
            "row": name,
            "tokens_per_s": tokens / middle,
            "secs": middle,
            "gib": peak,
            "loss": loss.item(),
            "warm": warm,
        }
    except Exception as error:
        row = {"row": name, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    print(json.dumps(row), flush=True)
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="*", help="rows whose name contains one of these words")
    asked = parser.parse_args()
    device = torch.device("cpu" if asked.tiny else "cuda", None if asked.tiny else 0)
    folder = write_config(Path(tempfile.mkdtemp()), asked.tiny)
    join(dist.HashStore(), rank=0, world=1, device=device, timeout=120)
    print(f"torch {torch.__version__}", flush=True)
    count, tokens = asked.documents, asked.documents * asked.tokens

    def batch(images: int) -> PackedBatch:
        found, pixels = documents(count, asked.tokens, images=images)
        packed = pack_documents(found, pixels, RULES, tower=True)
        assert packed.scoring is not None  # placeholders are trained too, as transformers does with these labels
        return replace(packed, scoring=packed.scoring._replace(banned=())).to(device)

    apart, shared = batch(count), batch(1)

    def make(kind: str, checkpointing: bool, on: PackedBatch = apart) -> Callable[[], Callable[[], Tensor]]:
        if kind == "transformers":
            return lambda: step_of_transformers(transformers_model(folder, device, checkpointing), on, count)
        return lambda: step_of_ours(ours(folder, device, checkpointing=checkpointing, masters=kind == "fsdp"), on)

    rows = {
        "ours": make("ours", False),
        "ours, all recomputed": make("ours", True),
        "transformers": make("transformers", False),
        "transformers, all recomputed": make("transformers", True),
        "ours, float32 masters": make("fsdp", False),
        "ours, float32 masters, all recomputed": make("fsdp", True),
        f"ours, group of {count}, one image": make("ours", False, shared),
    }
    for name, each in rows.items():
        if not asked.only or any(word in name for word in asked.only):
            measure(name, each, tokens, device, asked.repeats)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
