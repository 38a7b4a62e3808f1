"""Admission, order and void as properties: any interleaving of servers, trainer and failures."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.rollout.admission import Counts, Limits, capacity, staleness
from core.rollout.buffer import Buffer, Entry


def test_the_formula_of_the_design() -> None:
    limits = Limits(max_concurrent_rollouts=7, max_head_offpolicyness=2, batch_size=4)
    assert capacity(limits, Counts(consumed=8, ready=3, running=2), served=1) == min(7 - 2, (2 + 1 + 1) * 4 - 13)
    assert capacity(limits, Counts(consumed=8, ready=0, running=6), served=9) == 1
    assert capacity(limits, Counts(consumed=16), served=1) == 0
    assert capacity(Limits(None, 0, 4), Counts(), served=0) == 4, "no limit on what runs at once"
    assert capacity(limits, Counts(running=2), served=9, servers_room=3) == 3, "what the servers run bounds it too"
    assert capacity(limits, Counts(running=6), served=9, servers_room=-1) == 0, "a server has left"
    assert capacity(Limits(None, 9, 4, total_batches=2), Counts(consumed=4, running=3), served=0) == 1


EVENTS = st.lists(
    st.tuples(st.sampled_from(["admit", "finish", "void", "form", "train", "serve", "lag"]), st.integers(0, 30)),
    max_size=200,
)


@settings(max_examples=150, deadline=None)
@given(
    events=EVENTS,
    batch_size=st.integers(1, 4),
    offpolicyness=st.integers(0, 4),
    concurrent=st.none() | st.integers(1, 9),
)
def test_staleness_is_bounded_and_order_kept_under_any_interleaving(
    events: list[tuple[str, int]], batch_size: int, offpolicyness: int, concurrent: int | None
) -> None:
    limits = Limits(concurrent, offpolicyness, batch_size)
    buffer = Buffer(batch_size)
    running: list[Entry] = []
    formed: list[list[Entry]] = []
    voided: set[str] = set()
    admitted = trained = served = 0
    for event, n in events:
        if event == "admit":
            for _ in range(capacity(limits, buffer.counts(), served)):
                entry = Entry(f"0-{admitted}", None, served)
                admitted += 1
                buffer.add(entry)
                running.append(entry)
            assert concurrent is None or len(running) <= concurrent
        elif event in ("finish", "void") and running:
            entry = running.pop(n % len(running))
            if event == "finish":
                buffer.finish(entry, SimpleNamespace())  # type: ignore[arg-type]
            else:
                buffer.void(entry)
                voided.add(entry.group_id)
        elif event == "form" and buffer.head_is_ready():
            formed.append(buffer.take())
        elif event == "train" and trained < len(formed):
            trained += 1
        elif event == "serve":
            served = max(served, trained)
        counts = buffer.counts()
        assert counts.admitted == admitted - len(voided)
    for step, entries in enumerate(formed, 1):
        assert len(entries) == batch_size
        assert all(0 <= staleness(step, entry.started_version) <= offpolicyness for entry in entries)
    order = [entry.group_id for entries in formed for entry in entries]
    expected = [f"0-{i}" for i in range(admitted) if f"0-{i}" not in voided]
    assert order == expected[: len(order)], "admission order, the void left out, nothing dropped for its age"


@given(offpolicyness=st.integers(0, 5), batch_size=st.integers(1, 5))
def test_the_bound_is_tight(offpolicyness: int, batch_size: int) -> None:
    """While one version is served, offpolicyness + 1 batches are started, the last of them that stale, and no more."""
    limits, buffer = Limits(None, offpolicyness, batch_size), Buffer(batch_size)
    room = capacity(limits, buffer.counts(), 0)
    assert room == (offpolicyness + 1) * batch_size
    for i in range(room):
        entry = Entry(f"0-{i}", None, 0)
        buffer.add(entry)
        buffer.finish(entry, SimpleNamespace())  # type: ignore[arg-type]
    assert capacity(limits, buffer.counts(), 0) == 0
    ages = [staleness(step, buffer.take()[0].started_version) for step in range(1, offpolicyness + 2)]
    assert max(ages) == offpolicyness
    assert capacity(limits, buffer.counts(), 0) == 0, "consuming makes no room, serving does"
    assert capacity(limits, buffer.counts(), 1) == batch_size


def test_a_batch_cannot_be_taken_while_its_head_runs() -> None:
    buffer = Buffer(2)
    entries = [Entry(f"0-{i}", None, 0) for i in range(3)]
    for entry in entries:
        buffer.add(entry)
    for entry in entries[1:]:
        buffer.finish(entry, SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not all finished"):
        buffer.take()
    buffer.void(entries[0])
    assert [entry.group_id for entry in buffer.take()] == ["0-1", "0-2"], "the next one moves up"
