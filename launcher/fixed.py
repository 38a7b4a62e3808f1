"""What cannot change within a run: keys that say which data, which model and which objective its progress belongs to.

Owns the list and the comparison, values to values; `resume` refuses by name before anything starts, and a rank that
finds a checkpoint of another configuration refuses, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.config import Config

FIXED = (
    "type",
    "seed",
    "actor.path",
    "actor.dtype",
    "actor.freeze_vision",
    "actor.optimizer.type",
    "tokenizer_path",
    "train_dataset.path",
    "train_dataset.split",
    "train_dataset.batch_size",
    "train_dataset.shuffle",
    "train_dataset.drop_last",
    "train_dataset.dataset_kwargs",
    "gconfig.n_samples",
    "deterministic",
)
"""Progress is counted in batches of these rows, in this order, by moments of this optimizer."""


def fixed_values(config: Config) -> dict[str, Any]:
    tree = config.model_dump(mode="json")
    return {key: _at(tree, key) for key in FIXED}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """One line for each key that both know and that differs."""
    return [
        f"{key} was {before[key]!r} and would be {after[key]!r}"
        for key in FIXED
        if key in before and key in after and before[key] != after[key]
    ]


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
