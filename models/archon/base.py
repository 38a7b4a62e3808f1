"""What a family of models brings: arguments, module and checkpoint adapter.

Owns the shape of an entry of the registry; the protocol that the engine speaks is core.ops.packed.CausalVLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from core.ops.packed import CausalVLM, KVCache, Output, PackedBatch

__all__ = ["CausalVLM", "KVCache", "ModelFamily", "Output", "PackedBatch", "StateDictAdapter"]


class StateDictAdapter(Protocol):
    """Moves tensors between checkpoint files and a model, under the hub's names."""

    def tensors(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]: ...

    def load_into(self, model: nn.Module, path: str | Path) -> None: ...

    def load_tensors(self, model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None: ...


@dataclass(frozen=True)
class ModelFamily:
    """Classes of one family; `args` has from_pretrained, `model` has on_meta."""

    args: Any
    model: Any
    adapter: Any
