"""Checkpoints: whole or not there, newest good one wins, and never a silent start from nothing."""

from __future__ import annotations

import errno
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from core.engine import checkpoint as checkpoints
from tests.engine.scene import ADAM, alone, make_batch, make_engine, policy_step, whole

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def gather(value: object) -> list:
    return [value]


@pytest.fixture
def engine(checkpoint):
    return make_engine(checkpoint, alone(), optimizer=ADAM)


def save(root, step, engine, **state):
    return checkpoints.save(root, step, engine, {"data": state}, keep=2, gather=gather)


def test_everything_comes_back_bit_for_bit_and_the_next_step_is_the_same(tmp_path, engine, checkpoint):
    batch = make_batch(checkpoint)
    for _ in range(2):
        policy_step(engine, batch, lr=1e-3)
    save(tmp_path, 2, engine, place=7)
    again = make_engine(checkpoint, alone(), optimizer=ADAM)
    loaded = checkpoints.load(tmp_path, again, gather=gather)
    assert (loaded.step, loaded.state["data"], loaded.warnings) == (2, {"place": 7}, [])
    for each in (engine, again):
        policy_step(each, batch, lr=1e-3)
    assert all(torch.equal(a, b) for a, b in zip(whole(engine).values(), whole(again).values(), strict=True))
    assert all(torch.equal(a, again.optimizer.state()[n]) for n, a in engine.optimizer.state().items())
    assert engine.optimizer.updates == again.optimizer.updates


def test_only_the_newest_are_kept_and_latest_points_at_the_last(tmp_path, engine):
    for step in (5, 10, 15):
        save(tmp_path, step, engine)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-10", "step-15"]
    assert (tmp_path / "latest").resolve().name == "step-15"
    assert (checkpoints.newest(tmp_path), checkpoints.oldest(tmp_path)) == (15, 10)


def test_a_step_that_is_saved_again_replaces_itself(tmp_path, engine):
    save(tmp_path, 5, engine, place=1)
    save(tmp_path, 5, engine, place=2)
    assert checkpoints.load(tmp_path, engine, gather=gather).state["data"] == {"place": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-5"]


def test_training_goes_on_while_the_files_are_written_and_they_hold_what_was_staged(tmp_path, engine, checkpoint):
    batch = make_batch(checkpoint)
    policy_step(engine, batch, lr=1e-3)
    before = {name: tensor.clone() for name, tensor in whole(engine).items()}
    disk_is_free = threading.Event()

    def when_the_disk_is_free(value: object) -> list:
        assert disk_is_free.wait(60)
        return [value]

    staged = checkpoints.stage(1, engine, {"data": {}})
    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(checkpoints.write, tmp_path, staged, keep=2, gather=when_the_disk_is_free, group=None)
        for _ in range(2):
            policy_step(engine, batch, lr=1e-3)
        assert not writing.done() and not (tmp_path / "latest").exists()
        disk_is_free.set()
        writing.result(60)
    again = make_engine(checkpoint, alone(), optimizer=ADAM)
    assert checkpoints.load(tmp_path, again, gather=gather).step == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole(again).items())
    assert not all(torch.equal(tensor, before[name]) for name, tensor in whole(engine).items())


def damage_flip(path):
    shard = next(path.glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def damage_cut(path):
    shard = next(path.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-10])


def damage_missing(path):
    (path / ".metadata").unlink()


def damage_manifest(path):
    (path / "manifest.json").write_text("{")


@pytest.mark.parametrize("damage", [damage_flip, damage_cut, damage_missing, damage_manifest])
def test_a_broken_checkpoint_falls_back_to_the_one_before_with_a_warning(tmp_path, engine, damage):
    save(tmp_path, 5, engine, place=5)
    save(tmp_path, 10, engine, place=10)
    damage(tmp_path / "step-10")
    loaded = checkpoints.load(tmp_path, engine, gather=gather)
    assert (loaded.step, loaded.state["data"]) == (5, {"place": 5})
    assert len(loaded.warnings) == 1 and "step-10" in loaded.warnings[0]


def test_when_all_are_broken_the_run_stops_and_says_what_to_do(tmp_path, engine):
    save(tmp_path, 5, engine)
    damage_cut(tmp_path / "step-5")
    with pytest.raises(checkpoints.CheckpointError, match=r"step-5.*move the directory away to start afresh"):
        checkpoints.load(tmp_path, engine, gather=gather)


def test_nothing_saved_is_the_beginning_and_a_torn_writer_is_nothing(tmp_path, engine):
    assert checkpoints.load(tmp_path / "never", engine, gather=gather) is None
    (tmp_path / ".tmp-step-3").mkdir()
    assert checkpoints.load(tmp_path, engine, gather=gather) is None
    save(tmp_path, 4, engine)
    assert not (tmp_path / ".tmp-step-3").exists()


def test_a_full_disk_is_a_clear_error_and_the_older_checkpoint_stands(tmp_path, engine, monkeypatch):
    save(tmp_path, 5, engine, place=5)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "write_atomic", full)
    with pytest.raises(checkpoints.CheckpointError, match=r"step-10 could not be written by rank 0: .*No space left"):
        save(tmp_path, 10, engine)
    loaded = checkpoints.load(tmp_path, engine, gather=gather)
    assert loaded.step == 5
    assert json.loads((tmp_path / "latest" / "state.json").read_text())["data"] == {"place": 5}
