"""Rows by number, orders of epochs, and where data lies."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.data import rows as rows_module
from core.data.hub import HubError, resolve
from core.data.order import Order, Place
from core.data.rows import Rows, RowsError, split_files


def write_numbers(path: Path, numbers: range, group: int = 3) -> None:
    table = pa.table({"number": list(numbers), "body": [b"x" * 1000 for _ in numbers]})
    pq.write_table(table, path, row_group_size=group)


@pytest.fixture
def two_files(tmp_path: Path) -> Path:
    write_numbers(tmp_path / "train-00000-of-00002.parquet", range(0, 7))
    write_numbers(tmp_path / "train-00001-of-00002.parquet", range(7, 12))
    write_numbers(tmp_path / "validation-00000-of-00001.parquet", range(100, 104))
    return tmp_path


def test_rows_are_found_by_number_in_any_order(two_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "CACHED_BYTES", 4000)
    rows = Rows(split_files(two_files, "train"))
    assert len(rows) == 12
    assert [rows[n].columns["number"] for n in (11, 0, 6, 7, 3, 11, 2)] == [11, 0, 6, 7, 3, 11, 2]
    assert rows[8].place == "train-00001-of-00002.parquet:1"
    assert rows[8].index == 8
    assert sum(table.nbytes for table in rows._decoded.values()) <= 4000
    with pytest.raises(IndexError):
        rows[12]


def test_max_rows_takes_the_first(two_files: Path) -> None:
    assert len(Rows(split_files(two_files, "train"), max_rows=5)) == 5
    assert len(Rows(split_files(two_files, "train"), max_rows=500)) == 12


def test_a_relative_directory_may_have_a_colon_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "geometry:2").mkdir()
    write_numbers(tmp_path / "geometry:2" / "train.parquet", range(3))
    monkeypatch.chdir(tmp_path)
    rows = Rows(split_files(Path("geometry:2"), "train"))
    assert len(rows) == 3 and rows[2].columns["number"] == 2


def test_a_split_is_found_by_the_first_of_its_names(two_files: Path, tmp_path: Path) -> None:
    assert [file.name for file in split_files(two_files, "test", "validation")] == ["validation-00000-of-00001.parquet"]
    assert split_files(two_files / "train-00000-of-00002.parquet", "test") == [
        two_files / "train-00000-of-00002.parquet"
    ]
    (tmp_path / "hub" / "data").mkdir(parents=True)
    write_numbers(tmp_path / "hub" / "data" / "test.parquet", range(2))
    assert len(split_files(tmp_path / "hub", "test")) == 1
    with pytest.raises(RowsError, match=r"no dev-\*.parquet; it has data/test.parquet"):
        split_files(tmp_path / "hub", "dev")


def test_broken_files_are_named(tmp_path: Path) -> None:
    bad = tmp_path / "train-0.parquet"
    bad.write_bytes(b"PAR1 nothing")
    with pytest.raises(RowsError, match=r"train-0.parquet is not readable"):
        Rows([bad])
    write_numbers(bad, range(1000), group=500)
    body = bytearray(bad.read_bytes())
    body[50:400] = b"\xff" * 350
    bad.write_bytes(body)
    with pytest.raises(RowsError, match=r"train-0.parquet: row group 0"):
        Rows([bad])[0]


orders = st.builds(
    Order,
    rows=st.integers(1, 40),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    epochs=st.integers(1, 4),
    batch_size=st.none() | st.integers(1, 12),
)


@given(order=orders)
def test_an_epoch_uses_every_row_at_most_once_and_ends_at_whole_batches(order: Order) -> None:
    for epoch in range(order.epochs):
        used = [order.row(Place(epoch, position)) for position in range(order.epoch_length)]
        assert len(set(used)) == len(used)
        assert set(used) <= set(range(order.rows))
    assert order.epoch_length == (
        order.rows if order.batch_size is None else order.rows - order.rows % order.batch_size
    )


@given(order=orders, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_walking_in_any_steps_visits_the_same_places(order: Order, sizes: list[int]) -> None:
    whole = order.span(Place(0, 0), order.epochs * order.epoch_length + 5)
    assert len(whole) == order.epochs * order.epoch_length
    walked: list[Place] = []
    at: Place | None = Place(0, 0)
    turn = 0
    while at is not None and (span := order.span(at, sizes[turn % len(sizes)])):
        walked += span
        at = order.after(span[-1])
        turn += 1
    assert walked == whole


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    def rows(seed: int, epoch: int) -> list[int]:
        order = Order(rows=50, seed=seed, shuffle=True, epochs=2)
        return [order.row(Place(epoch, n)) for n in range(50)]

    assert rows(1, 0) == rows(1, 0)
    assert len({tuple(rows(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4
    assert rows(1, 0) != sorted(rows(1, 0))


def test_the_order_of_a_seed_never_changes() -> None:
    # numpy.argsort(numpy.random.PCG64([1, 0]).random_raw(8)); a resumed run depends on it
    order = Order(rows=8, seed=1, shuffle=True, epochs=1)
    assert [order.row(Place(0, n)) for n in range(8)] == GOLDEN


GOLDEN = [2, 4, 7, 5, 0, 6, 3, 1]


def test_hub_ids_are_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    old, new = (tmp_path / "cache" / "datasets--a--b" / "snapshots" / name for name in ("old", "new"))
    old.mkdir(parents=True)
    new.mkdir()
    (old.parent.parent / "refs").mkdir()
    (old.parent.parent / "refs" / "main").write_text("old")
    assert resolve("a/b", cache=tmp_path / "cache", kind="dataset") == old
    in_home = tmp_path / "home" / "hub" / "models--a--b" / "snapshots" / "x"
    in_home.mkdir(parents=True)
    assert resolve("a/b", cache=tmp_path / "cache", kind="model") == in_home
    assert resolve(str(tmp_path), cache=None, kind="model") == tmp_path
    with pytest.raises(HubError, match=r"'c/d' is not on this machine .*prepare CONFIG"):
        resolve("c/d", cache=tmp_path / "cache", kind="model")
    with pytest.raises(HubError, match="looked at"):
        resolve("../no such/place", cache=tmp_path / "cache", kind="model")
