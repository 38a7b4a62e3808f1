"""One request on its way through the embedded engine, and what may be asked of it.

Owns the request's own state (prompt, tokens so far, versions, end) and the reading of SGLang's sampling_params. It
knows no slots, no model and no HTTP.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from core.data.images import Grid
from core.data.mrope import mrope_position_ids

BAN = -100.0  # a logit_bias at or below it means: never
_NEUTRAL: Mapping[str, object] = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "n": 1,
    "stop": None,
    "stop_regex": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "custom_params": None,
    "stream_interval": None,
}
_IGNORED = frozenset(
    {
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "no_stop_trim",
        "stop_str_max_len",
        "return_text_in_logprobs",
    }
)


class BadRequestError(Exception):
    """What a client asked for cannot be done; answered with status 400 and this message."""


@dataclass(frozen=True)
class ModelTraits:
    """What the engine needs to know of a model beyond its forward."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    image_token_id: int | None
    video_token_id: int | None
    has_vision: bool
    merge: int = 2
    tokens_per_second: float = 1.0

    @property
    def placeholders(self) -> tuple[int, ...]:
        return tuple(token for token in (self.image_token_id, self.video_token_id) if token is not None)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: `banned` are at -inf always, `stop_token_ids` until min_new_tokens are there."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int = 0
    banned: frozenset[int] = frozenset()
    bias: tuple[tuple[int, float], ...] = ()

    @classmethod
    def parse(cls, params: Mapping[str, Any], traits: ModelTraits) -> Sampling:
        """From SGLang's sampling_params; what is neither known nor neutral is refused by name."""
        for key, value in params.items():
            if key in _NEUTRAL:
                if value not in (None, _NEUTRAL[key], [], ""):
                    raise BadRequestError(f"sampling_params.{key}={value!r} is not built into the embedded server")
            elif key not in _READ and key not in _IGNORED:
                raise BadRequestError(f"sampling_params.{key} is not known to the embedded server")
        get = _Reader(params)
        bias = get.biases(traits.vocab_size)
        seed = params.get("sampling_seed")
        stops = get.ids("stop_token_ids", traits.vocab_size)
        sampling = cls(
            temperature=get.number("temperature", 1.0, 0.0, None),
            top_p=get.number("top_p", 1.0, 0.0, 1.0),
            top_k=get.integer("top_k", -1, -1),
            max_new_tokens=get.integer("max_new_tokens", 128, 1),
            min_new_tokens=get.integer("min_new_tokens", 0, 0),
            stop_token_ids=stops | frozenset(traits.eos_token_ids),
            ignore_eos=get.flag("ignore_eos"),
            seed=int.from_bytes(os.urandom(8), "little") if seed is None else get.integer("sampling_seed", 0, None),
            banned=frozenset(token for token, value in bias if value <= BAN) | frozenset(traits.placeholders),
            bias=tuple((token, value) for token, value in bias if value > BAN),
        )
        if sampling.min_new_tokens > sampling.max_new_tokens:
            raise BadRequestError(
                f"min_new_tokens={sampling.min_new_tokens} is more than max_new_tokens={sampling.max_new_tokens}"
            )
        if len(sampling.banned) >= traits.vocab_size:
            raise BadRequestError("logit_bias bans every token")
        return sampling


_READ = {
    "temperature",
    "top_p",
    "top_k",
    "max_new_tokens",
    "min_new_tokens",
    "stop_token_ids",
    "ignore_eos",
    "sampling_seed",
    "logit_bias",
}


class _Reader:
    """Typed fields of a JSON object; each error names its key."""

    def __init__(self, params: Mapping[str, Any]) -> None:
        self.params = params

    def number(self, key: str, default: float, low: float, high: float | None) -> float:
        value = self.params.get(key)
        if value is None:
            return default
        fits = isinstance(value, int | float) and not isinstance(value, bool) and value >= low
        if not fits or (high is not None and value > high) or value == float("inf"):
            limits = f"at least {low:g}" if high is None else f"between {low:g} and {high:g}"
            raise BadRequestError(f"sampling_params.{key} must be a number {limits}, got {value!r}")
        return float(value)

    def integer(self, key: str, default: int, low: int | None) -> int:
        value = self.params.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
            least = "" if low is None else f" of at least {low}"
            raise BadRequestError(f"sampling_params.{key} must be an integer{least}, got {value!r}")
        return value

    def flag(self, key: str) -> bool:
        value = self.params.get(key) or False
        if not isinstance(value, bool):
            raise BadRequestError(f"sampling_params.{key} must be true or false, got {value!r}")
        return value

    def ids(self, key: str, vocab_size: int) -> frozenset[int]:
        value = self.params.get(key) or []
        if not isinstance(value, list):
            raise BadRequestError(f"sampling_params.{key} must be a list of token ids")
        return frozenset(_token(item, vocab_size, f"sampling_params.{key}") for item in value)

    def biases(self, vocab_size: int) -> list[tuple[int, float]]:
        value = self.params.get("logit_bias") or {}
        if not isinstance(value, dict):
            raise BadRequestError("sampling_params.logit_bias must map token ids to numbers")
        found = []
        for key, bias in value.items():
            if isinstance(bias, bool) or not isinstance(bias, int | float) or bias != bias or bias > 1e6:
                raise BadRequestError(f"sampling_params.logit_bias[{key}] must be a number, got {bias!r}")
            token = int(key) if str(key).isdecimal() else key
            found.append((_token(token, vocab_size, "sampling_params.logit_bias"), float(bias)))
        return found


def _token(value: object, vocab_size: int, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise BadRequestError(f"{where}: {value!r} is not a token id of this model (0 to {vocab_size - 1})")
    return value


@dataclass(frozen=True, eq=False)
class PromptImage:
    """A decoded image as the tower takes it."""

    hash: str
    grid: Grid
    patches_PK: np.ndarray  # float32

    def tokens(self, merge: int) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns // (merge * merge)


@dataclass(frozen=True, eq=False)
class Prompt:
    """Expanded ids, their positions and images; `key` is equal for equal prompts."""

    ids: np.ndarray  # int64 [T]
    positions_3T: np.ndarray  # int64
    images: tuple[PromptImage, ...]
    key: bytes

    @classmethod
    def expand(cls, input_ids: list[int], images: tuple[PromptImage, ...], traits: ModelTraits) -> Prompt:
        """Repeats each image's ONE placeholder as often as it has embeddings; refuses what does not fit."""
        for token in input_ids:
            _token(token, traits.vocab_size, "input_ids")
        if not input_ids:
            raise BadRequestError("input_ids is empty")
        given = np.asarray(input_ids, dtype=np.int64)
        is_image = given == traits.image_token_id if traits.image_token_id is not None else np.zeros(given.shape, bool)
        if int(is_image.sum()) != len(images):
            raise BadRequestError(
                f"input_ids has {int(is_image.sum())} image placeholders and image_data {len(images)} images; "
                "give exactly ONE placeholder per image"
            )
        if images and not traits.has_vision:
            raise BadRequestError("image_data: this model has no vision tower")
        if traits.video_token_id is not None and (given == traits.video_token_id).any():
            raise BadRequestError("input_ids has a video placeholder; the embedded server takes images only")
        repeats = np.ones(given.shape, dtype=np.int64)
        repeats[is_image] = [image.tokens(traits.merge) for image in images]
        ids = np.repeat(given, repeats)
        positions = mrope_position_ids(
            ids,
            [image.grid for image in images],
            image_token_id=traits.image_token_id,
            video_token_id=traits.video_token_id,
            merge=traits.merge,
            tokens_per_second=traits.tokens_per_second,
        )
        state = xxhash.xxh3_128(ids.tobytes())
        for image in images:
            state.update(image.hash.encode())
        return cls(ids, positions, images, state.digest())

    @property
    def shift(self) -> int:
        """Position minus index of the tokens that follow the prompt."""
        return int(self.positions_3T.max()) + 1 - len(self.ids)


@dataclass(eq=False)
class Request:
    """A prompt and what was sampled for it so far. Written by the engine's thread only."""

    rid: str
    prompt: Prompt
    sampling: Sampling
    notify: Callable[[Request], None] | None = None
    """Called by the engine's thread when the request has ended, and before that at most once in `every` seconds."""
    every: float | None = None
    notified: float = 0.0
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)
    """[version, start, end] of runs of output tokens."""
    cached_tokens: int = 0
    finish: dict[str, Any] | None = None
    error: str | None = None

    @property
    def length(self) -> int:
        return len(self.prompt.ids) + len(self.output_ids)

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None

    @property
    def early(self) -> bool:
        return len(self.output_ids) < self.sampling.min_new_tokens

    def append(self, token: int, logprob: float, version: str) -> None:
        """One sampled token; sets `finish` when it is the last one."""
        count = len(self.output_ids)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][2] = count + 1
        else:
            self.spans.append([version, count, count + 1])
        self.logprobs.append(logprob)
        self.output_ids.append(token)
        if token in self.sampling.stop_token_ids and not self.sampling.ignore_eos:
            self.finish = {"type": "stop", "matched": token}
        elif count + 1 >= self.sampling.max_new_tokens:
            self.finish = {"type": "length", "length": count + 1}
