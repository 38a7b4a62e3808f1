"""Samples and groups as they are trained on, and their form on the wire and on disk.

Owns the types and the codec (one safetensors body); it neither makes samples (core.rollout) nor packs them for a model
(core.engine.microbatch). Numpy only: the rollout service and the login node import it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

_FORMAT = "samples-1"
_MAX_METADATA = 512 << 20


class TrajectoryError(Exception):
    """A sample or a body of samples contradicts itself."""


@dataclass(frozen=True)
class ImageRef:
    """An image by content hash, with its size before and after our resize and its grid in patches."""

    hash: str
    original: tuple[int, int]
    resized: tuple[int, int]
    grid_thw: tuple[int, int, int]

    @property
    def patches(self) -> int:
        return self.grid_thw[0] * self.grid_thw[1] * self.grid_thw[2]

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> ImageRef:
        return ImageRef(
            str(value["hash"]),
            (int(value["original"][0]), int(value["original"][1])),
            (int(value["resized"][0]), int(value["resized"][1])),
            (int(value["grid_thw"][0]), int(value["grid_thw"][1]), int(value["grid_thw"][2])),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "hash": self.hash,
            "original": list(self.original),
            "resized": list(self.resized),
            "grid_thw": list(self.grid_thw),
        }


@dataclass(frozen=True)
class Sample:
    """One answer. `prompt_ids` are the EXPANDED ids that the server reported; the other arrays are per sampled id."""

    sample_id: str
    group_id: str
    prompt_id: str
    epoch: int
    prompt_ids: NDArray[np.int32]
    sampled_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: str
    reward: float
    started_version: int
    reward_parts: dict[str, float] = field(default_factory=dict)
    images: tuple[ImageRef, ...] = ()
    prompt_text: str = ""
    text: str = ""
    stop_matched: int | str | None = None
    reward_error: str | None = None
    restarts: int = 0
    continuations: int = 0

    def __post_init__(self) -> None:
        if not len(self.sampled_ids) == len(self.logprobs) == len(self.versions):
            raise TrajectoryError(
                f"sample {self.sample_id}: {len(self.sampled_ids)} sampled ids, {len(self.logprobs)} logprobs and "
                f"{len(self.versions)} versions: they must be as many"
            )

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.sampled_ids)

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def patches(self) -> int:
        return sum(image.patches for image in self.images)

    @property
    def accuracy(self) -> float:
        """The part named accuracy where the reward has one, else 1 for a full reward."""
        part = self.reward_parts.get("accuracy")
        return float(part) if part is not None else float(self.reward >= 1 - 1e-6)


@dataclass(frozen=True)
class Group:
    """The n_samples answers to one prompt, started at one version."""

    group_id: str
    epoch: int
    position: int
    prompt_id: str
    started_version: int
    samples: tuple[Sample, ...]


def group_id_of(epoch: int, position: int) -> str:
    return f"{epoch}-{position}"


def encode_samples(samples: Sequence[Sample], header: Mapping[str, Any]) -> bytes:
    """One safetensors body: tensors for the per-token arrays, JSON in the metadata for the rest."""
    tokens, logprobs, versions = [], [], []
    for sample in samples:
        prompt_length = len(sample.prompt_ids)
        tokens += [sample.prompt_ids, sample.sampled_ids]
        logprobs += [np.zeros(prompt_length, np.float32), sample.logprobs]
        versions += [np.full(prompt_length, -1, np.int32), sample.versions]
    arrays = {
        "tokens": _joined(tokens, np.int32),
        "lengths": np.array([sample.length for sample in samples], np.int32),
        "prompt_lengths": np.array([len(sample.prompt_ids) for sample in samples], np.int32),
        "logprobs": _joined(logprobs, np.float32),
        "versions": _joined(versions, np.int32),
        "rewards": np.array([sample.reward for sample in samples], np.float32),
    }
    shared, rest = _strings_once([_rest_of(sample) for sample in samples])
    metadata = {
        "format": _FORMAT,
        "header": json.dumps(dict(header)),
        "shared": json.dumps(shared),
        "samples": json.dumps(rest),
    }
    return save_tensors(arrays, metadata=metadata)


def decode_samples(body: bytes) -> tuple[list[Sample], dict[str, Any]]:
    """The samples and the header of a body made by encode_samples. Raises TrajectoryError where it is torn or wrong."""
    metadata = _metadata(body)
    try:
        arrays = load_tensors(body)
        shared, rest = json.loads(metadata["shared"]), json.loads(metadata["samples"])
        lengths, prompt_lengths = arrays["lengths"], arrays["prompt_lengths"]
    except Exception as error:
        raise TrajectoryError(f"a body of samples cannot be read: {error}") from error
    if not len(lengths) == len(prompt_lengths) == len(rest) == len(arrays["rewards"]):
        raise TrajectoryError(f"a body of samples counts {len(lengths)} lengths but {len(rest)} records")
    if int(lengths.sum()) != len(arrays["tokens"]) or (prompt_lengths > lengths).any():
        count = len(arrays["tokens"])
        raise TrajectoryError(f"a body of samples has {count} tokens, its lengths sum to {lengths.sum()}")
    samples, start = [], 0
    for i, record in enumerate(rest):
        middle, end = start + int(prompt_lengths[i]), start + int(lengths[i])
        fields = {**shared[record.pop("shared")], **record}
        fields["images"] = tuple(ImageRef.from_json(image) for image in fields["images"])
        samples.append(
            Sample(
                prompt_ids=arrays["tokens"][start:middle],
                sampled_ids=arrays["tokens"][middle:end],
                logprobs=arrays["logprobs"][middle:end],
                versions=arrays["versions"][middle:end],
                reward=float(arrays["rewards"][i]),
                **fields,
            )
        )
        start = end
    return samples, json.loads(metadata["header"])


def decode_header(body: bytes) -> dict[str, Any]:
    """Only the header of a body (its first bytes suffice as long as they hold the safetensors header whole)."""
    return json.loads(_metadata(body)["header"])


def _metadata(body: bytes) -> dict[str, str]:
    if len(body) < 8:
        raise TrajectoryError(f"a body of samples is torn: {len(body)} bytes")
    size = int.from_bytes(body[:8], "little")
    if size > min(len(body) - 8, _MAX_METADATA):
        raise TrajectoryError(f"a body of samples is torn: a header of {size} bytes in a body of {len(body)}")
    try:
        metadata = json.loads(body[8 : 8 + size])["__metadata__"]
    except (ValueError, KeyError) as error:
        raise TrajectoryError(f"a body of samples has no readable header: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise TrajectoryError(f"a body of samples has format {metadata.get('format')!r}, {_FORMAT!r} is read")
    return metadata


_GROUP_FIELDS = ("group_id", "prompt_id", "epoch", "started_version", "prompt_text")
_SAMPLE_FIELDS = (
    "sample_id",
    "finish_reason",
    "stop_matched",
    "reward_parts",
    "text",
    "reward_error",
    "restarts",
    "continuations",
)


def _rest_of(sample: Sample) -> tuple[dict[str, Any], dict[str, Any]]:
    group = {name: getattr(sample, name) for name in _GROUP_FIELDS}
    group["images"] = [image.to_json() for image in sample.images]
    return group, {name: getattr(sample, name) for name in _SAMPLE_FIELDS}


def _strings_once(records: list[tuple[dict, dict]]) -> tuple[list[dict], list[dict]]:
    """The samples of a group share prompt and images: written once per group, not once per sample."""
    shared: list[dict] = []
    seen: dict[str, int] = {}
    rest = []
    for group, own in records:
        key = json.dumps(group, sort_keys=True)
        if key not in seen:
            seen[key] = len(shared)
            shared.append(group)
        rest.append({**own, "shared": seen[key]})
    return shared, rest


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)
