"""Samples on the wire and on disk."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from core.rl.trajectory import ImageRef, Sample, TrajectoryError, decode_header, decode_samples, encode_samples

IDS = st.lists(st.integers(0, 151_935), max_size=12)
IMAGES = st.builds(
    ImageRef,
    st.text("0123456789abcdef", min_size=4, max_size=4),
    st.just((3, 5)),
    st.just((28, 56)),
    st.just((1, 2, 4)),
)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    sampled = draw(IDS)
    count = len(sampled)
    group = f"{draw(st.integers(0, 2))}-{draw(st.integers(0, 3))}"
    floats = st.lists(st.floats(-50, 0, width=32), min_size=count, max_size=count)
    return Sample(
        f"{group}-0",
        group,
        "train-1",
        0,
        np.array(draw(IDS), np.int32),
        np.array(sampled, np.int32),
        np.array(draw(floats), np.float32),
        np.full(count, draw(st.integers(0, 9)), np.int32),
        draw(st.sampled_from(["stop", "length"])),
        float(np.float32(draw(st.floats(-2, 2)))),
        3,
        draw(st.dictionaries(st.sampled_from(["accuracy", "format"]), st.floats(0, 1))),
        tuple(draw(st.lists(IMAGES, max_size=2))),
        draw(st.text(max_size=8)),
        draw(st.text(max_size=8)),
        draw(st.none() | st.integers(0, 9)),
        draw(st.none() | st.just("raised: x")),
    )


def plain(sample: Sample) -> dict[str, object]:
    return {key: (value.tolist() if isinstance(value, np.ndarray) else value) for key, value in vars(sample).items()}


@settings(max_examples=60, deadline=None)
@given(st.lists(samples(), max_size=5), st.dictionaries(st.text(max_size=4), st.integers()))
def test_what_is_encoded_is_decoded(given_samples: list[Sample], header: dict[str, int]) -> None:
    body = encode_samples(given_samples, header)
    decoded, read = decode_samples(body)
    assert [plain(sample) for sample in decoded] == [plain(sample) for sample in given_samples]
    assert read == header == decode_header(body)


def test_the_tensors_are_those_of_the_contract() -> None:
    sample = Sample(
        "0-1-0",
        "0-1",
        "train-3",
        0,
        np.array([1, 2, 3], np.int32),
        np.array([8, 9], np.int32),
        np.array([-0.5, -1.5], np.float32),
        np.array([4, 5], np.int32),
        "stop",
        1.0,
        4,
    )
    tensors = load(encode_samples([sample, sample], {}))
    assert {name: tensor.dtype.name for name, tensor in tensors.items()} == {
        "tokens": "int32",
        "lengths": "int32",
        "prompt_lengths": "int32",
        "logprobs": "float32",
        "versions": "int32",
        "rewards": "float32",
    }
    assert tensors["tokens"].tolist() == [1, 2, 3, 8, 9] * 2
    assert tensors["logprobs"].tolist() == [0, 0, 0, -0.5, -1.5] * 2
    assert tensors["versions"].tolist() == [-1, -1, -1, 4, 5] * 2
    assert tensors["lengths"].tolist() == [5, 5] and tensors["prompt_lengths"].tolist() == [3, 3]


def test_a_groups_prompt_text_travels_once() -> None:
    one = Sample(
        *("0-1-0", "0-1", "train-3", 0),
        np.zeros(1, np.int32),
        *(np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32)),
        *("stop", 1.0, 4),
        prompt_text="long" * 1000,
    )
    assert len(encode_samples([one] * 8, {})) < 4000 + 8 * 400


def test_a_sample_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(TrajectoryError, match="2 sampled ids, 1 logprobs"):
        ids, logprobs = np.zeros(2, np.int32), np.zeros(1, np.float32)
        Sample("a", "0-0", "p", 0, ids, ids, logprobs, ids, "stop", 0.0, 0)


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 400), flip=st.integers(0, 100))
def test_a_torn_or_foreign_body_is_refused_never_misread(cut: int, flip: int) -> None:
    whole = encode_samples([], {"step": 1})
    with pytest.raises(TrajectoryError):
        decode_samples(whole[: min(cut, len(whole) - 1)])
    foreign = struct.pack("<Q", 2) + b"{}"
    with pytest.raises(TrajectoryError):
        decode_samples(foreign)
    huge = struct.pack("<Q", 1 << 60) + whole[8:]
    with pytest.raises(TrajectoryError, match="torn"):
        decode_samples(huge)


def test_another_format_is_named() -> None:
    header = json.dumps({"__metadata__": {"format": "samples-9"}}).encode()
    with pytest.raises(TrajectoryError, match="samples-9"):
        decode_samples(struct.pack("<Q", len(header)) + header)
