"""A version is written by all ranks, appears at once, and is never half there."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.weights.errors import NameTakenError, WeightsError
from core.weights.fetch import fetch
from core.weights.manifest import describe, read_manifest, verify
from core.weights.publish import remove_version, versions
from core.weights.tensors import read_tensors

ROOT = Path(__file__).resolve().parents[2]


def test_tensors_come_back_bit_for_bit(tmp_path, tensors, publish_alone) -> None:
    manifest = publish_alone("v000000-r0", tensors)
    directory = tmp_path / "weights" / "v000000-r0"
    assert read_manifest(directory, manifest.digest) == manifest
    verify(directory, manifest)
    by_safetensors = load_file(directory / "model-00001-of-00001.safetensors")
    ours = dict(read_tensors(directory))
    assert by_safetensors.keys() == tensors.keys() == ours.keys()
    for name, tensor in tensors.items():
        assert torch.equal(by_safetensors[name], tensor) and torch.equal(ours[name], tensor)
        assert by_safetensors[name].dtype == tensor.dtype
    assert describe(directory) == {name: (record.shape, record.dtype) for name, record in manifest.tensors.items()}
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()


def test_companion_files_travel_and_weights_of_the_base_do_not(tmp_path, tensors, publish_alone) -> None:
    manifest = publish_alone("v000000-r0", {name: tensor.float() for name, tensor in tensors.items()})
    directory = tmp_path / "weights" / "v000000-r0"
    names = {path.name for path in directory.iterdir()}
    assert names == {*manifest.files, "manifest.json"}
    assert {"preprocessor_config.json", "tokenizer.json", "config.json"} <= names
    assert "model.safetensors" not in names
    assert json.loads((directory / "config.json").read_text())["torch_dtype"] == "float32", "what was really written"


def test_the_same_weights_give_the_same_files_twenty_times(tmp_path, tensors, publish_alone) -> None:
    contents = set()
    for version in range(20):
        name = f"v{version:06d}-r0"
        publish_alone(name, {key: tensor.clone() for key, tensor in tensors.items()}, version)
        contents.add((tmp_path / "weights" / name / "model-00001-of-00001.safetensors").read_bytes())
    assert len(contents) == 1


def test_a_name_is_never_used_twice(tmp_path, tensors, publish_alone) -> None:
    publish_alone("v000001-r0", tensors, 1)
    with pytest.raises(NameTakenError, match="v000001-r0"):
        publish_alone("v000001-r0", tensors, 1)
    remove_version(tmp_path / "weights", "v000001-r0")
    assert versions(tmp_path / "weights") == []
    with pytest.raises(NameTakenError, match="published before"):
        publish_alone("v000001-r0", tensors, 1)
    publish_alone("v000001-r1", tensors, 1)
    assert versions(tmp_path / "weights") == ["v000001-r1"]


@pytest.mark.parametrize("name", ["", "../x", ".hidden", "a/b"])
def test_a_name_cannot_leave_its_directory(tmp_path, tensors, publish_alone, name) -> None:
    with pytest.raises(WeightsError):
        publish_alone(name, tensors)
    with pytest.raises(WeightsError):
        remove_version(tmp_path / "weights", name)


def test_what_a_dead_publisher_left_is_swept(tmp_path, tensors, publish_alone) -> None:
    left = tmp_path / "weights" / ".tmp-v000000-r0"
    left.mkdir(parents=True)
    (left / "model-00001-of-00001.safetensors").write_bytes(b"half")
    publish_alone("v000000-r1", tensors)
    assert not left.exists()
    assert versions(tmp_path / "weights") == ["v000000-r1"]


RANK = """
import os, sys, json, datetime, time
from pathlib import Path
import torch, torch.distributed as dist
from core.weights.publish import publish
rank, world, root, mode = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
store = dist.FileStore(str(root / "store"), world)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60))
torch.manual_seed(0)
everything = {f"layer.{i}.weight": torch.randn(50, 40 + i) for i in range(7)}
mine = {name: tensor for i, (name, tensor) in enumerate(everything.items()) if i % world == rank}
if mode == "twice":
    mine = everything
if mode == "full" and rank == 1:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
def gather(item):
    out = [None] * world
    dist.all_gather_object(out, item)
    return out
dist.barrier()
start = time.perf_counter()
try:
    manifest = publish(root / "weights", "v000003-r2", mine, root / "aux", rank=rank, world=world, gather=gather,
                       barrier=dist.barrier, version=3, generation=2, lineage=[(0, 0), (3, 2)])
    print(json.dumps({"digest": manifest.digest, "secs": time.perf_counter() - start}))
except Exception as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
dist.barrier()
"""


def run_ranks(root: Path, world: int, mode: str) -> list[dict]:
    (root / "aux").mkdir()
    (root / "aux" / "config.json").write_text("{}")
    command = [sys.executable, "-c", textwrap.dedent(RANK)]
    children = [
        subprocess.Popen(
            [*command, str(rank), str(world), str(root), mode],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        for rank in range(world)
    ]
    try:
        return [json.loads(child.communicate(timeout=90)[0]) for child in children]
    finally:
        for child in children:
            child.kill()


def test_ranks_write_in_parallel_one_file_each(tmp_path) -> None:
    answers = run_ranks(tmp_path, 2, "plain")
    assert answers[0]["digest"] == answers[1]["digest"]
    directory = tmp_path / "weights" / "v000003-r2"
    manifest = read_manifest(directory, answers[0]["digest"])
    assert (manifest.version, manifest.generation, manifest.lineage) == (3, 2, ((0, 0), (3, 2)))
    verify(directory, manifest)
    torch.manual_seed(0)
    expected = {f"layer.{i}.weight": torch.randn(50, 40 + i) for i in range(7)}
    got = dict(read_tensors(directory))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert len(list(directory.glob("*.safetensors"))) == 2


@pytest.mark.parametrize(
    ("mode", "kind", "words"), [("full", "DiskFullError", "rank 1"), ("twice", "WeightsError", "two ranks")]
)
def test_a_rank_that_fails_fails_all_and_leaves_nothing(tmp_path, mode, kind, words) -> None:
    answers = run_ranks(tmp_path, 2, mode)
    assert [answer["error"] for answer in answers] == [kind, kind]
    assert all(words in answer["message"] for answer in answers), answers
    assert versions(tmp_path / "weights") == []
    assert list((tmp_path / "weights").glob(".tmp*")) == []


def test_a_tiny_version_is_published_and_fetched_in_a_fraction_of_the_sync_budget(tmp_path, publish_alone) -> None:
    tiny = {f"model.layers.{i}.weight": torch.randn(340, 200) for i in range(10)}  # 0.68 M parameters
    secs = []
    for version in range(5):
        start = time.perf_counter()
        manifest = publish_alone(f"v{version:06d}-r0", tiny, version)
        fetch(tmp_path / "weights" / f"v{version:06d}-r0", manifest.digest, tmp_path / "local")
        secs.append(time.perf_counter() - start)
    assert sorted(secs)[2] < 0.2, secs
