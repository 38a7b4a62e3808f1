"""Files that others read while they are written: whole or not there, torn tails ignored, many writers at once."""

import json
import multiprocessing
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.telemetry.files import append_line, read_lines, write_atomic
from core.telemetry.metrics import MetricsReader, read_metrics


def test_a_reader_sees_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    contents = [str(digit).encode() * 200_000 for digit in range(10)]
    write_atomic(path, contents[0])
    done = threading.Event()

    def write() -> None:
        for data in contents * 5:
            write_atomic(path, data)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    looked = 0
    while not done.is_set() or looked == 0:
        assert path.read_bytes() in contents
        looked += 1
    writer.join(timeout=30)
    assert [entry.name for entry in tmp_path.iterdir()] == ["whole"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "whole"
    write_atomic(path, "old")
    with pytest.raises(TypeError):
        write_atomic(path, object())  # type: ignore[arg-type]
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["whole"]


def _append(path: Path, writer: int) -> None:
    for i in range(200):
        append_line(path, {"writer": writer, "i": i, "fill": "x" * (i * 7)})


def test_lines_of_several_processes_stay_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append, args=(path, writer)) for writer in range(4)]
    for process in writers:
        process.start()
    for process in writers:
        process.join(timeout=60)
        assert process.exitcode == 0
    rows = read_lines(path)
    for writer in range(4):
        assert [row["i"] for row in rows if row["writer"] == writer] == list(range(200))


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 60))
def test_a_torn_tail_is_ignored_and_written_past(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "lines"
    for i in range(3):
        append_line(path, {"i": i, "text": "é" * 5})
    size = path.stat().st_size
    os.truncate(path, size - min(cut, size))
    kept = read_lines(path)
    assert kept == [{"i": i, "text": "é" * 5} for i in range(len(kept))]
    append_line(path, {"i": 99})
    assert read_lines(path)[-1] == {"i": 99}
    assert read_lines(path)[:-1] == kept


def test_numbers_json_does_not_know_become_null(tmp_path: Path) -> None:
    append_line(tmp_path / "lines", {"a": float("nan"), "b": [float("inf"), 1.5]})
    assert json.loads((tmp_path / "lines").read_text()) == {"a": None, "b": [None, 1.5]}


def test_a_missing_file_has_no_lines(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "none") == []


def test_metrics_are_read_on_from_where_the_last_look_ended(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    assert reader.poll() == []
    append_line(path, {"kind": "step", "step": 1, "loss": 1.0})
    with path.open("a") as file:
        file.write('{"kind":"step","st')
    assert [record["step"] for record in reader.poll()] == [1]
    assert reader.poll() == []
    with path.open("a") as file:
        file.write('ep":2}\n')
    assert [record["step"] for record in reader.poll()] == [2]
    assert [record["step"] for record in reader.metrics.steps] == [1, 2]


def test_a_run_that_went_back_forgets_the_later_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step, loss in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.9)):
        append_line(path, {"kind": "step", "step": step, "loss": loss})
    assert [(record["step"], record["loss"]) for record in read_metrics(path).steps] == [(1, 0.1), (2, 0.9)]
