"""A version is written by all ranks, appears at once, and is never half there."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.weights.errors import NameTakenError, WeightsError
from core.weights.fetch import fetch
from core.weights.manifest import describe, read_manifest, verify
from core.weights.tensors import read_tensors
from core.weights.versions import remove_version, versions

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


def test_much_is_written_and_fetched_as_several_files(tmp_path, publish_alone, monkeypatch) -> None:
    tensors = {f"layer.{n}": torch.randn(40, 8) for n in range(6)}
    monkeypatch.setattr("core.weights.publish._PART_BYTES", 2 * 40 * 8 * 4)
    manifest = publish_alone("v000000-r0", tensors)
    directory = tmp_path / "weights" / "v000000-r0"
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    assert files == [f"model-00001-of-00001{part}.safetensors" for part in ("-2", "-3", "")]
    assert {record.file for record in manifest.tensors.values()} == set(files)
    local = fetch(directory, manifest.digest, tmp_path / "local")
    ours = dict(read_tensors(local))
    assert ours.keys() == tensors.keys() and all(torch.equal(ours[name], tensors[name]) for name in tensors)


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
import datetime, json, resource, sys
from pathlib import Path
import torch, torch.distributed as dist
from core.weights.publish import publish
rank, world, root = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
store = dist.FileStore(str(root / "store"), world)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60))
torch.manual_seed(0)
everything = {f"layer.{i}.weight": torch.randn(50, 40 + i) for i in range(7)}
def gather(item):
    out = [None] * world
    dist.all_gather_object(out, item)
    return out
answers = {}
for mode in ("plain", "full", "twice"):
    mine = {name: tensor for i, (name, tensor) in enumerate(everything.items()) if i % world == rank or mode == "twice"}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if mode == "full" and rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        manifest = publish(root / mode, "v000003-r2", mine, root / "aux", rank=rank, world=world, gather=gather,
                           barrier=dist.barrier, version=3, generation=2, lineage=[(0, 0), (3, 2)])
        answers[mode] = {"digest": manifest.digest}
    except Exception as error:
        answers[mode] = {"error": type(error).__name__, "message": str(error)}
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
print(json.dumps(answers))
dist.barrier()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    """Two gloo ranks that publish three times: as they should, with rank 1's disk full, and one tensor on both."""
    root = tmp_path_factory.mktemp("ranks")
    (root / "aux").mkdir()
    (root / "aux" / "config.json").write_text("{}")
    children = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), "2", str(root)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        for rank in range(2)
    ]
    try:
        return root, [json.loads(child.communicate(timeout=100)[0]) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_ranks_write_in_parallel_one_file_each(ranks: tuple[Path, list[dict]]) -> None:
    root, answers = ranks
    digest = answers[0]["plain"]["digest"]
    assert answers[1]["plain"]["digest"] == digest
    directory = root / "plain" / "v000003-r2"
    manifest = read_manifest(directory, digest)
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
def test_a_rank_that_fails_fails_all_and_leaves_nothing(
    ranks: tuple[Path, list[dict]], mode: str, kind: str, words: str
) -> None:
    root, answers = ranks
    assert [answer[mode]["error"] for answer in answers] == [kind, kind]
    assert all(words in answer[mode]["message"] for answer in answers), answers
    assert versions(root / mode) == []
    assert list((root / mode).glob(".tmp*")) == []


def test_a_tiny_version_is_published_and_fetched_in_a_fraction_of_the_sync_budget(tmp_path, publish_alone) -> None:
    tiny = {f"model.layers.{i}.weight": torch.randn(340, 200) for i in range(10)}  # 0.68 M parameters
    secs = []
    for version in range(5):
        start = time.perf_counter()
        manifest = publish_alone(f"v{version:06d}-r0", tiny, version)
        fetch(tmp_path / "weights" / f"v{version:06d}-r0", manifest.digest, tmp_path / "local")
        secs.append(time.perf_counter() - start)
    assert sorted(secs)[2] < 0.2, secs
