"""Packing as a function: what hypothesis may not break, and that it balances."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.engine.microbatch import Item, Limits, Packing, PackingError, karmarkar_karp, pack


@st.composite
def batches(draw):
    items = []
    for g in range(draw(st.integers(1, 7))):
        patches = draw(st.sampled_from([0, 4, 36, 100]))
        images = ((f"image {g}", patches),) if patches else ()
        for _ in range(draw(st.integers(1, 5))):
            items.append(Item(draw(st.integers(2, 60)) + patches // 4, f"group {g}", images))
    limit = draw(st.sampled_from([None, 40, 90, 300]))
    limits = Limits(
        limit,
        None if limit is None else limit * 4,
        n_mbs=draw(st.integers(1, 3)),
        n_mbs_divisor=draw(st.integers(1, 3)),
        algorithm=draw(st.sampled_from(["ffd", "kk"])),
    )
    return items, draw(st.integers(1, 5)), draw(st.integers(1, 3)), limits


@settings(max_examples=150, deadline=None)
@given(batches())
def test_every_sample_is_packed_once_within_the_limits_and_ranks_stay_in_step(case):
    items, ranks, minibatches, limits = case
    packing = pack(items, ranks=ranks, minibatches=minibatches, limits=limits)
    everything = [i for m in packing.minibatches for r in range(ranks) for i in m.samples_of(r)]
    assert sorted(everything) == list(range(len(items)))
    assert len(packing.minibatches) == minibatches
    for minibatch in packing.minibatches:
        counts = {len(rank) for rank in minibatch.ranks}
        assert len(counts) == 1 == len({len(minibatch.tower), *counts})
        assert counts.pop() % limits.n_mbs_divisor == 0
        for rank in minibatch.ranks:
            assert len(rank) >= limits.n_mbs
            for micro in rank:
                images = {name: n for i in micro for name, n in items[i].images}
                if limits.max_tokens is not None and len(micro) > 1:
                    assert sum(items[i].tokens for i in micro) <= limits.max_tokens
                    assert sum(images.values()) <= limits.max_patches
        for j, tower in enumerate(minibatch.tower):
            assert tower == any(items[i].images for rank in minibatch.ranks for i in rank[j])
    assert Packing.from_json(json.loads(json.dumps(packing.to_json()))) == packing


@settings(max_examples=60, deadline=None)
@given(batches())
def test_the_same_batch_is_packed_the_same_way_twice(case):
    items, ranks, minibatches, limits = case
    first = pack(items, ranks=ranks, minibatches=minibatches, limits=limits)
    assert first == pack(items, ranks=ranks, minibatches=minibatches, limits=limits)


@pytest.mark.parametrize("algorithm", ["ffd", "kk"])
def test_a_group_stays_together_where_it_fits(algorithm):
    items = [Item(50, f"g{i // 8}", ((f"h{i // 8}", 36),)) for i in range(64)]
    limits = Limits(1000, 4000, algorithm=algorithm)
    (minibatch,) = pack(items, ranks=2, limits=limits).minibatches
    for rank in minibatch.ranks:
        for micro in rank:
            counts = [sum(items[i].group == f"g{g}" for i in micro) for g in range(8)]
            assert set(counts) <= {0, 8}


def test_a_group_larger_than_a_micro_batch_is_cut_into_as_few_parts_as_hold_it():
    items = [Item(50, "g", (("h", 36),)) for _ in range(8)]
    (minibatch,) = pack(items, ranks=1, limits=Limits(160, 640)).minibatches
    assert sorted(len(micro) for micro in minibatch.ranks[0]) == [2, 3, 3]


def test_patches_count_besides_tokens():
    # the same text everywhere; two samples with large images must not meet on one rank
    items = [Item(100, f"g{i}", ((f"h{i}", 4000),) if i < 2 else ()) for i in range(10)]
    (minibatch,) = pack(items, ranks=2, limits=Limits(patch_cost=0.25)).minibatches
    assert all(sum(i < 2 for i in minibatch.samples_of(rank)) == 1 for rank in range(2))
    # and within a micro-batch they have a limit of their own
    (minibatch,) = pack(items, ranks=1, limits=Limits(10_000, 5000)).minibatches
    assert all(sum(i < 2 for i in micro) <= 1 for micro in minibatch.ranks[0])


def test_fewer_groups_than_ranks_are_split_and_no_rank_idles():
    items = [Item(40, "one") for _ in range(8)]
    (minibatch,) = pack(items, ranks=4).minibatches
    assert [len(minibatch.samples_of(rank)) for rank in range(4)] == [2, 2, 2, 2]


def test_ranks_without_samples_get_empty_micro_batches():
    (minibatch,) = pack([Item(10, "a"), Item(10, "b")], ranks=3).minibatches
    assert sorted(len(minibatch.samples_of(rank)) for rank in range(3)) == [0, 1, 1]
    assert all(len(rank) == 1 for rank in minibatch.ranks)


def test_minibatches_are_whole_groups_in_order():
    items = [Item(10, f"g{i // 4}") for i in range(24)]
    packing = pack(items, ranks=2, minibatches=3)
    found = [sorted(i for rank in range(2) for i in m.samples_of(rank)) for m in packing.minibatches]
    assert found == [list(range(0, 8)), list(range(8, 16)), list(range(16, 24))]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(1, 3))
def test_karmarkar_karp_is_near_the_best_partition(costs, parts):
    found = karmarkar_karp(costs, parts)
    assert sorted(i for part in found for i in part) == list(range(len(costs)))
    best = min(
        max(sum(c for c, p in zip(costs, assignment, strict=True) if p == k) for k in range(parts))
        for assignment in itertools.product(range(parts), repeat=len(costs))
    )
    # the differencing method is within 4/3 of the best
    assert max(sum(costs[i] for i in part) for part in found) <= best * 4 / 3 + 1e-9


def test_what_cannot_be_packed_is_named():
    with pytest.raises(PackingError, match="packing_algorithm 'best'"):
        pack([Item(1)], ranks=1, limits=Limits(algorithm="best"))
    with pytest.raises(PackingError, match="0 ranks"):
        pack([Item(1)], ranks=0)
