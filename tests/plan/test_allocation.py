"""The allocation grammar: what it reads, what it refuses and where the caret stands."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.allocation import (
    INFERENCE_BACKENDS,
    TRAINING_BACKENDS,
    Allocation,
    AllocationError,
    Component,
    Dims,
    parse,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("d8p1t1", [[("archon", Dims(d=8))]]),
        ("vllm:d4+d4", [[("vllm", Dims(d=4))], [("archon", Dims(d=4))]]),
        ("vllm:d4p1t1+d4p1t1", [[("vllm", Dims(d=4))], [("archon", Dims(d=4))]]),
        ("sglang:d1p1t1+d7p1t1", [[("sglang", Dims(d=1))], [("archon", Dims(d=7))]]),
        ("sglang:d8+d8", [[("sglang", Dims(d=8))], [("archon", Dims(d=8))]]),
        ("sglang:d4+fsdp:d4", [[("sglang", Dims(d=4))], [("fsdp", Dims(d=4))]]),
        ("sglang:d1 + fsdp:d1", [[("sglang", Dims(d=1))], [("fsdp", Dims(d=1))]]),
        ("sglang:d16+archon:d8", [[("sglang", Dims(d=16))], [("archon", Dims(d=8))]]),
        ("sglang:d6+archon:d2", [[("sglang", Dims(d=6))], [("archon", Dims(d=2))]]),
        ("sglang:d4", [[("sglang", Dims(d=4))]]),
        ("vllm:t2d4|archon:c2t2d2", [[("vllm", Dims(d=4, t=2)), ("archon", Dims(d=2, t=2, c=2))]]),
        ("  embedded:t2p3\t+ e2d4 ", [[("embedded", Dims(p=3, t=2))], [("archon", Dims(d=4, e=2))]]),
    ],
)
def test_reads(text: str, expected: list[list[tuple[str, Dims]]]) -> None:
    assert [[(each.backend, each.dims) for each in group] for group in parse(text).groups] == expected


def test_colocation_binds_tighter_than_separation() -> None:
    allocation = parse("sglang[a]:d2|archon[b]:d2+archon[c]:d4")
    assert [len(group) for group in allocation.groups] == [2, 1]
    assert allocation.world == 6


@pytest.mark.parametrize(
    ("text", "column", "width", "words"),
    [
        ("vllm:d0+d4", 5, 2, "at least 1"),
        ("vllm:d4d2+d4", 7, 1, "twice"),
        ("sglnag:d4+d4", 0, 6, "did you mean 'sglang'"),
        ("sglang:d4p1t1+megatron:d4p1t1", 14, 8, "known but not built"),
        ("sglang:d8t4+megatron:(attn:d4p4t2|ffn:d2p4e4)", 12, 8, "known but not built"),
        ("sglang:d4+(attn:d4|ffn:d4)", 10, 1, "(attn:…|ffn:…) is known but not built"),
        ("sglang:d4+archon:(attn:d4|ffn:d4)", 17, 1, "(attn:…|ffn:…) is known but not built"),
        ("sglang:d4+d4+d4", 0, 9, "need names"),
        ("sglang[a]:d4+archon[a]:d4", 13, 12, "given twice"),
        ("sglang:d4|archon:d2", 17, 2, "wants 4 and archon:d2 wants 2"),
        ("sglang:d4+eval", 10, 4, "'eval' is known but not built"),
        ("sglang:d4+cpu", 10, 3, "'cpu' is known but not built"),
        ("", 0, 1, "dims are expected"),
        ("sglang", 6, 1, "':' and dims"),
        ("sglang:", 7, 1, "dims are expected"),
        ("sglang:d4+", 10, 1, "dims are expected"),
        ("sglang:d4++d4", 10, 1, "dims are expected"),
        ("sglang:d4,d4", 9, 1, "',' is no dimension"),
        ("sglang:d4 d4", 10, 1, "joined by '+' or '|'"),
        ("sglang:dd4", 7, 1, "a number is expected"),
        ("sglang:d-4", 7, 1, "a number is expected"),
        ("sglang:d٣", 7, 1, "a number is expected"),
        ("sglang:x4", 7, 1, "'x' is no dimension"),
        ("sglang:d99999999", 7, 9, "larger than any cluster"),
        ("sglang[]:d4", 7, 1, "a name"),
        ("sglang[a:d4", 8, 1, "']'"),
        ("sglang[a]d4", 9, 1, "':' and dims"),
    ],
)
def test_refuses_with_a_caret(text: str, column: int, width: int, words: str) -> None:
    with pytest.raises(AllocationError) as caught:
        parse(text)
    assert words in caught.value.message
    lines = str(caught.value).splitlines()
    assert lines[-2] == "    " + text
    assert lines[-1] == "    " + " " * column + "^" * width


numbers = st.integers(1, 999_999)
dims = st.builds(Dims, d=numbers, p=numbers, t=numbers, c=numbers, e=numbers)
backends = st.sampled_from(INFERENCE_BACKENDS + TRAINING_BACKENDS)


@st.composite
def allocations(draw: st.DrawFn) -> Allocation:
    count = draw(st.integers(1, 5))
    names = draw(st.lists(st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_]*\Z"), min_size=count, max_size=count, unique=True))
    groups: list[list[Component]] = []
    for name in names:
        together = bool(groups) and draw(st.booleans())
        own = groups[-1][0].dims if together else draw(dims)
        component = Component(draw(backends), own, name if count > 2 or draw(st.booleans()) else None)
        if together:
            groups[-1].append(component)
        else:
            groups.append([component])
    return Allocation(tuple(map(tuple, groups)))


@given(allocations())
@settings(max_examples=200, deadline=None)
def test_text_of_an_allocation_reads_back_as_it(allocation: Allocation) -> None:
    assert parse(str(allocation)) == allocation


@given(st.permutations(["d2", "p3", "t4", "c5", "e6"]))
def test_order_of_dims_means_nothing(parts: list[str]) -> None:
    assert parse("".join(parts)).components[0].dims == Dims(2, 3, 4, 5, 6)


def test_2000_strings_are_read_or_refused_with_a_caret_inside() -> None:
    random_ = random.Random(2)
    pieces = ["sglang", "vllm", "embedded", "archon", "fsdp", "megatron", "eval", "cpu", ":", "[", "]", "+", "|"]
    pieces += ["(", ")", "d", "p", "t", "c", "e", "0", "1", "4", "16", " ", "\t", "\n", "x", "é", "٣", "\x00", "attn"]
    pieces += ["ffn", "-", ""]
    started = time.monotonic()
    read = 0
    for _ in range(2000):
        text = "".join(random_.choices(pieces, k=random_.randint(0, 9)))
        if random_.random() < 0.5:
            text = f"sglang:d4{text}+d{random_.randint(0, 9)}"
        try:
            allocation = parse(text)
        except AllocationError as error:
            assert 0 <= error.start <= len(text)
            shown, carets = str(error).splitlines()[-2:]
            assert len(shown) == len(text) + 4 and carets.strip("^ ") == ""
        else:
            read += 1
            assert parse(str(allocation)) == allocation
    assert read > 20
    assert time.monotonic() - started < 5
