"""Tensors of a checkpoint directory, published or from the hub."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from core.weights.errors import CorruptError
from core.weights.shards import shard_files

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def read_tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every weight file, one at a time, on the CPU; a truncated file is refused by name."""
    for name in shard_files(directory):
        path = directory / name
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  not a dict
                    yield key, file.get_tensor(key)
        except SafetensorError as error:
            raise CorruptError(f"{path}: {error}") from error
