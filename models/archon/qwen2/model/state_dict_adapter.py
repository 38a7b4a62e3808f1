"""Tensors of a checkpoint into a model and back, under the hub's names.

Owns the names of both layouts (the hub's, and that of transformers 4.52 and later), the tied head, and the check that
every tensor is there with its shape. Reads each tensor once and only this rank's part of it where it is sharded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from models.archon.qwen2.model.args import Qwen2ModelArgs

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # activation checkpointing, compile


class CheckpointError(ValueError):
    """A checkpoint does not fit the model, or a part of it is missing or broken."""


class Qwen2StateDictAdapter:
    """Between files (either layout in, the hub's out) and the parameters of a Qwen2Model."""

    def __init__(self, args: Qwen2ModelArgs) -> None:
        self.args = args

    def hub_name(self, name: str) -> str:
        """The hub's name of a tensor in either layout."""
        for prefix, hub in (("model.language_model.", "model."), ("model.visual.", "visual.")):
            if name.startswith(prefix):
                return hub + name[len(prefix) :]
        return name

    def from_hub(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """State of a whole checkpoint (either layout) under the model's names; a tied head appears under both."""
        found = {self.hub_name(name): tensor for name, tensor in state.items()}
        if self.args.tie_word_embeddings and EMBEDDING in found:
            found.setdefault(HEAD, found[EMBEDDING])
        return found

    def to_hub(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's state as the hub ships it: a tied head is left out."""
        found = {self.hub_name(name): tensor for name, tensor in state.items()}
        if self.args.tie_word_embeddings:
            found.pop(HEAD, None)
        return found

    def tensors(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of the model by hub name, each once (a tied head not at all), as this rank holds them."""
        for name, parameter in model.named_parameters():
            yield _unwrapped(name), parameter

    def load_into(self, model: nn.Module, path: str | Path) -> None:
        """Copies a checkpoint directory into the model's parameters, in their dtype.

        Raises CheckpointError naming the file or tensor at fault; nothing is copied when a name or shape is wrong.
        """
        path = Path(path)
        with ExitStack() as stack:
            files = {file: _open(stack, file) for file in _files(path)}
            slices = {name: (file, opened.get_slice(name)) for file, opened in files.items() for name in opened.keys()}  # noqa: SIM118
            found = self._by_hub_name({name: tuple(part.get_shape()) for name, (_, part) in slices.items()}, path)
            whole = {name: tuple(parameter.shape) for name, parameter in self.tensors(model)}
            self._check(whole, {hub: shape for hub, (_, shape) in found.items()}, path)
            if self.args.tie_word_embeddings and HEAD in found:
                self._check_tied(slices[found[HEAD][0]][1], slices[found[EMBEDDING][0]][1], path)
            with torch.no_grad():
                for hub, parameter in self.tensors(model):
                    file, part = slices[found[hub][0]]
                    try:
                        _assign(parameter, part)
                    except SafetensorError as error:
                        raise CheckpointError(f"{file}: {hub}: {error}") from error

    def load_tensors(self, model: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies whole tensors (either layout) into the model; every parameter must come exactly once.

        Raises CheckpointError; what came before the fault has been copied then.
        """
        parameters = dict(self.tensors(model))
        missing = set(parameters)
        with torch.no_grad():
            for name, tensor in tensors:
                hub = self.hub_name(name)
                if hub == HEAD and self.args.tie_word_embeddings:
                    continue
                if hub not in missing:
                    raise CheckpointError(f"{name}: {'came twice' if hub in parameters else 'unknown to the model'}")
                wanted = tuple(parameters[hub].shape)
                if tuple(tensor.shape) != wanted:
                    raise CheckpointError(f"{name}: shape {list(tensor.shape)}, the model wants {list(wanted)}")
                _assign(parameters[hub], tensor)
                missing.remove(hub)
        if missing:
            raise CheckpointError(f"missing tensors: {_some(sorted(missing))}")

    def _by_hub_name(self, shapes: Mapping[str, tuple[int, ...]], path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for name, shape in shapes.items():
            hub = self.hub_name(name)
            if hub in found:
                raise CheckpointError(f"{path}: {name} and {found[hub][0]} are the same tensor in two layouts")
            found[hub] = (name, shape)
        return found

    def _check(self, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]], path: Path) -> None:
        optional = {HEAD} if self.args.tie_word_embeddings else set()
        problems = []
        if missing := sorted(set(wanted) - set(found)):
            problems.append(f"missing tensors: {_some(missing)}")
        if extra := sorted(set(found) - set(wanted) - optional):
            problems.append(f"tensors unknown to the model: {_some(extra)}")
        for name in sorted(set(wanted) & set(found)):
            if wanted[name] != found[name]:
                problems.append(f"{name}: shape {list(found[name])}, the model wants {list(wanted[name])}")
        if problems:
            raise CheckpointError(f"{path}: " + "; ".join(problems[:8]))

    def _check_tied(self, head: Any, embedding: Any, path: Path) -> None:
        if head.get_shape() != embedding.get_shape() or not torch.equal(head[:], embedding[:]):
            raise CheckpointError(
                f"{path}: config.json ties the head, but {HEAD} differs from {EMBEDDING}; "
                "set tie_word_embeddings: false"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _files(path: Path) -> list[Path]:
    """Files of a checkpoint: those of its index, or the one file."""
    index = path / "model.safetensors.index.json"
    single = path / "model.safetensors"
    if not index.exists():
        if not single.exists():
            raise CheckpointError(f"{path}: neither model.safetensors nor model.safetensors.index.json")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (json.JSONDecodeError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index}: not an index of safetensors files: {error!r}") from error
    if strange := [name for name in names if Path(name).name != name]:
        raise CheckpointError(f"{index}: {strange[0]!r} is no file of this directory")
    if missing := [name for name in names if not (path / name).exists()]:
        raise CheckpointError(f"{path}: {missing[0]} is named by the index and missing; copy it from the source again")
    return [path / name for name in names]


def _open(stack: ExitStack, file: Path) -> Any:
    try:
        return stack.enter_context(safe_open(file, framework="pt"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file}: not a whole safetensors file: {error}") from error


def _unwrapped(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _assign(parameter: Tensor, source: Any) -> None:
    """Copies this rank's part of `source` (a tensor or a slice of a file) into the parameter."""
    local, start = parameter, [0] * parameter.ndim
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        shape, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
        start = list(offset)
        if local.numel() == 0 or 0 in shape:
            return
    part = source[tuple(slice(s, s + n) for s, n in zip(start, local.shape, strict=True))]
    local.copy_(part)
