"""A Qwen2.5-VL of the published 3B shape with random weights, and pictures of the sizes that Geometry3K has.

Owns both as files on this machine, made in seconds: weights are drawn on the GPU where there is one.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file

from launcher.roles.tiny import tokenizer
from launcher.roles.tiny.checkpoint import TinyModel, config_json, preprocessor_json, tensor_shapes

SHAPED_3B = TinyModel(
    hidden=2048,
    layers=36,
    heads=16,
    kv_heads=2,
    intermediate=11008,
    vocab=151936,
    vision_depth=32,
    vision_hidden=1280,
    vision_heads=16,
    vision_intermediate=3420,
    full_attention=(7, 15, 23, 31),
    dtype="bfloat16",
    initializer_range=0.02,
    jitter=0.02,
    rope_theta=1e6,
    max_positions=128000,
)
# head widths of 64 and 80, as the kernels of a GPU want them
SHAPED_TINY = TinyModel(
    hidden=256, intermediate=512, vision_hidden=320, vision_intermediate=512, dtype="bfloat16", jitter=0.02
)
# width, height of rows of Geometry3K, from its smallest to its largest in a sample
SIZES = (
    *((214, 303), (250, 251), (282, 150), (301, 116), (316, 230)),
    *((336, 257), (353, 212), (556, 447), (569, 383), (628, 453)),
)
PROBLEMS = ("Find x.", "Find the area of the triangle.", "If m angle 1 = 40 and AB = 30, find the length of CD.")


def write_model(directory: Path, model: TinyModel, device: torch.device) -> int:
    """The checkpoint in the hub's layout; returns the bytes of its weights."""
    _, _, special = tokenizer.build()
    directory.mkdir(parents=True)
    tokenizer.write(directory, max_length=model.max_positions)
    ends = [special["<|im_end|>"], special["<|endoftext|>"]]
    for name, value in (
        ("config.json", config_json(model, special)),
        ("generation_config.json", {"eos_token_id": ends, "pad_token_id": ends[1]}),
        ("preprocessor_config.json", preprocessor_json(model)),
    ):
        (directory / name).write_text(json.dumps(value, indent=1))
    shapes = list(tensor_shapes(model))
    parts = [shapes[: len(shapes) // 2], shapes[len(shapes) // 2 :]]
    weight_map, total = {}, 0
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = dict(drawn(part, model, device))
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def drawn(
    shapes: list[tuple[str, tuple[int, ...]]], model: TinyModel, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, shape in shapes:
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        centre = 1.0 if len(shape) == 1 and not name.endswith(".bias") else 0.0
        noise = torch.randn(shape, generator=generator, device=device)
        yield name, (centre + model.initializer_range * noise).bfloat16().cpu()


def write_pictures(directory: Path, rows: int) -> None:
    """`train`, in the schema of hiyouga/geometry3k: line drawings on white, each of one of SIZES."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(0)
    table = [
        {
            "images": [{"bytes": picture(rng, SIZES[n % len(SIZES)]), "path": f"{n}.png"}],
            "problem": f"<image>{PROBLEMS[n % len(PROBLEMS)]}",
            "answer": str(int(rng.integers(1, 90))),
        }
        for n in range(rows)
    ]
    pq.write_table(pa.Table.from_pylist(table), directory / "train-00000-of-00001.parquet")


def picture(rng: np.random.Generator, size: tuple[int, int]) -> bytes:
    image = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(image)
    corners = [(int(rng.integers(8, size[0] - 8)), int(rng.integers(8, size[1] - 8))) for _ in range(4)]
    pen.polygon(corners[:3], outline="black")
    pen.line(corners[2:], fill="black", width=2)
    for corner, letter in zip(corners, "ABCD", strict=True):
        pen.text(corner, letter, fill="black")
    body = io.BytesIO()
    image.save(body, "PNG")
    return body.getvalue()
