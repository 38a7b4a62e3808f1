"""What is on disk after a crash at any place of a batch's writing."""

from __future__ import annotations

import os
from collections import UserDict
from collections.abc import KeysView
from pathlib import Path

import numpy as np
import pytest

from core.rl.trajectory import Group, ImageRef, Sample
from core.rollout.journal import Journal, JournalError, read_last_publish, remove_old_versions, write_last_publish
from core.telemetry.files import read_lines


def group(position: int, image: str) -> Group:
    sample = Sample(
        f"0-{position}-0",
        f"0-{position}",
        f"train-{position}",
        0,
        np.array([1], np.int32),
        np.array([2], np.int32),
        np.array([-1.0], np.float32),
        np.array([position], np.int32),
        "stop",
        1.0,
        0,
        images=(ImageRef(image, (28, 28), (28, 28), (1, 2, 2)),),
    )
    return Group(f"0-{position}", 0, position, f"train-{position}", 0, (sample,))


def journal_in(root: Path) -> Journal:
    journal = Journal(root / "batches", root / "images", root / "index.jsonl", root / "void.jsonl")
    journal.open()
    return journal


def write(journal: Journal, step: int, images: str) -> None:
    groups = [group(10 * step + i, name) for i, name in enumerate(images)]
    header = {"cursor_after": {"epoch": 0, "position": step}, "stats": {}}
    journal.write_batch(step, groups, header, {name: name.encode() for name in images})


def test_the_newest_batch_without_a_gap_is_where_work_goes_on(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    for step in (1, 2, 4):
        write(journal, step, "a")
    assert journal.last_after(0) == 2 and journal.last_after(2) == 2 and journal.last_after(3) == 4
    assert journal.cursor_after(2) == {"epoch": 0, "position": 2}
    assert journal.cursor_after(0) == {"epoch": 0, "position": 0}
    with pytest.raises(JournalError, match="step 7"):
        journal.cursor_after(7)


def test_index_lines_that_a_crash_cost_are_written_later_and_only_once(tmp_path: Path) -> None:
    write(journal_in(tmp_path), 1, "ab")
    (tmp_path / "index.jsonl").unlink()
    for _ in range(2):
        journal = journal_in(tmp_path)
        journal.restore_index(1)
    lines = read_lines(tmp_path / "index.jsonl")
    assert [(line["batch"], line["group_id"], line["images"], line["version_max"]) for line in lines] == [
        (1, "0-10", ["a"], 10),
        (1, "0-11", ["b"], 11),
    ]


def test_a_half_indexed_batch_is_completed_group_by_group(tmp_path: Path) -> None:
    write(journal_in(tmp_path), 1, "ab")
    index = tmp_path / "index.jsonl"
    index.write_text(index.read_text().splitlines()[0] + '\n{"batch": 1, "grou')
    journal = journal_in(tmp_path)
    journal.restore_index(1)
    assert [line["group_id"] for line in read_lines(index)] == ["0-10", "0-11"]


def test_a_shared_image_stays_until_the_last_batch_that_shows_it_goes(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    write(journal, 1, "ab")
    write(journal, 2, "bc")
    journal = journal_in(tmp_path)  # counted anew from the files
    journal.retain(2)
    assert sorted(path.stem for path in (tmp_path / "images").iterdir()) == ["b", "c"]
    assert journal.oldest() == 2 and journal.cursor_after(1) == {"epoch": 0, "position": 1}, "the index still knows it"
    with pytest.raises(JournalError, match="the oldest kept is 2"):
        journal.read_batch(1)


def test_an_image_is_not_removed_with_an_old_batch_while_a_new_one_is_written(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    write(journal, 1, "a")

    class Header(UserDict[str, object]):
        """Read when the images are there: just then the trainer has saved a checkpoint."""

        def keys(self) -> KeysView[str]:
            journal.retain(2)
            return super().keys()

    header = Header(cursor_after={"epoch": 1, "position": 0}, stats={})
    journal.write_batch(2, [group(20, "a")], header, {"a": b"a"})
    assert (tmp_path / "images" / "a.png").exists()


def test_a_damaged_batch_is_named(tmp_path: Path) -> None:
    journal = journal_in(tmp_path)
    write(journal, 1, "a")
    journal.path(1).write_bytes(journal.path(1).read_bytes()[:100])
    with pytest.raises(JournalError, match=r"000001\.safetensors"):
        journal.read_batch(1)


def test_torn_temporary_files_of_a_killed_writer_go(tmp_path: Path) -> None:
    journal_in(tmp_path)
    torn = tmp_path / "batches" / ".000001.safetensors.x.tmp"
    torn.write_bytes(b"half")
    journal_in(tmp_path)
    assert not torn.exists()


def test_a_version_is_kept_while_someone_reads_it(tmp_path: Path) -> None:
    for age, name in enumerate(["v000001-r0", "v000002-r0", "v000003-r0", "v000004-r0", "v000002-r1"]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text("{}")  # what makes a directory a version
        os.utime(tmp_path / name, (age, age))
    (tmp_path / ".v000005-r1.tmp").mkdir()
    gone = remove_old_versions(tmp_path, {"v000001-r0"}, keep=2)
    assert gone == ["v000002-r0", "v000003-r0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *(".v000005-r1.tmp", "v000001-r0", "v000002-r1", "v000004-r0")
    ]
    assert remove_old_versions(tmp_path, set(), keep=2) == ["v000001-r0"]


def test_the_last_publish_is_remembered(tmp_path: Path) -> None:
    batches = tmp_path / "batches"
    batches.mkdir()
    assert read_last_publish(batches) is None
    write_last_publish(batches, {"version": 3, "attempt": 1})
    assert read_last_publish(batches) == {"version": 3, "attempt": 1}
