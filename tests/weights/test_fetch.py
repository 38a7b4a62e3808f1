"""What does not match its manifest is refused, by name, before any server hears of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.weights.errors import CorruptError, DiskFullError, MismatchError, NotVisibleError, WeightsError
from core.weights.fetch import fetch, fetched, release
from core.weights.manifest import Manifest, VerifyMode, describe, read_manifest, refuse_other_tensors, verify

ROOT = Path(__file__).resolve().parents[2]
SHARD = "model-00001-of-00001.safetensors"


@pytest.fixture
def published(tmp_path, tensors, publish_alone) -> tuple[Path, Manifest]:
    return tmp_path / "weights" / "v000004-r0", publish_alone("v000004-r0", tensors, 4)


def refused(published: tuple[Path, Manifest], local: Path, mode: VerifyMode = "full") -> WeightsError:
    directory, manifest = published
    with pytest.raises(WeightsError) as caught:
        fetch(directory, manifest.digest, local, verify=mode, visible_secs=0)
    assert not local.exists() or list(local.iterdir()) == [], "nothing half-done stays"
    return caught.value


def test_a_fetched_version_is_the_published_one_and_is_fetched_once(tmp_path, published) -> None:
    directory, manifest = published
    local = fetch(directory, manifest.digest, tmp_path / "local")
    assert local == tmp_path / "local" / "v000004-r0"
    assert {p.name: p.read_bytes() for p in local.iterdir()} == {p.name: p.read_bytes() for p in directory.iterdir()}
    verify(local, manifest)
    assert fetched(tmp_path / "local", "v000004-r0", manifest.digest) == manifest
    shutil.rmtree(directory)
    assert fetch(directory, manifest.digest, tmp_path / "local") == local
    release(tmp_path / "local", "v000004-r0")
    assert fetched(tmp_path / "local", "v000004-r0", manifest.digest) is None
    with pytest.raises(NotVisibleError):
        fetch(directory, manifest.digest, tmp_path / "local", visible_secs=0)


def test_a_flipped_bit_anywhere_is_refused_by_tensor(tmp_path, published, tensors) -> None:
    directory, _manifest = published
    whole = (directory / SHARD).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = {entry["data_offsets"][0]: name for name, entry in json.loads(whole[8:header]).items() if name in tensors}
    for start, name in places.items():
        broken = bytearray(whole)
        broken[header + start] ^= 0x10
        (directory / SHARD).write_bytes(broken)
        error = refused(published, tmp_path / "local")
        assert isinstance(error, CorruptError) and SHARD in str(error) and f"tensor {name}:" in str(error)
    broken = bytearray(whole)
    broken[20] ^= 0x01
    (directory / SHARD).write_bytes(broken)
    assert SHARD in str(refused(published, tmp_path / "local"))
    (directory / SHARD).write_bytes(whole)
    (directory / "config.json").write_bytes((directory / "config.json").read_bytes().replace(b"qwen2", b"qwen3"))
    assert "config.json" in str(refused(published, tmp_path / "local"))


def test_sizes_mode_sees_all_but_bit_flips(tmp_path, published) -> None:
    directory, manifest = published
    whole = (directory / SHARD).read_bytes()
    (directory / SHARD).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    fetch(directory, manifest.digest, tmp_path / "sizes", verify="sizes", visible_secs=0)
    (directory / SHARD).write_bytes(whole[:-1])
    assert "bytes" in str(refused(published, tmp_path / "local", "sizes"))


def test_a_short_a_long_and_a_missing_file_are_refused(tmp_path, published) -> None:
    directory, _ = published
    whole = (directory / SHARD).read_bytes()
    for content, kind in ((whole[:-100], NotVisibleError), (whole + b"x", MismatchError), (b"", NotVisibleError)):
        (directory / SHARD).write_bytes(content)
        error = refused(published, tmp_path / "local")
        assert type(error) is kind and SHARD in str(error)
    (directory / SHARD).unlink()
    error = refused(published, tmp_path / "local")
    assert SHARD in str(error) and "lm_head.weight" in str(error)


def change(kind: str, tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    changed = dict(tensors)
    if kind == "missing":
        del changed["model.norm.weight"]
        return changed, ["tensor model.norm.weight is missing"]
    if kind == "extra":
        changed["model.layers.9.weight"] = torch.zeros(3)
        return changed, ["tensor model.layers.9.weight is extra"]
    if kind == "renamed":
        changed["model.final_norm.weight"] = changed.pop("model.norm.weight")
        return changed, ["model.norm.weight is missing", "model.final_norm.weight is extra"]
    if kind == "shape":
        changed["model.norm.weight"] = changed["model.norm.weight"].reshape(4, 4)
        return changed, ["tensor model.norm.weight has shape [4, 4] instead of [16]"]
    changed["model.norm.weight"] = changed["model.norm.weight"].view(torch.int32)
    return changed, ["tensor model.norm.weight is I32 instead of F32"]


KINDS = ["missing", "extra", "renamed", "shape", "dtype"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["full", "sizes"])
def test_other_tensors_than_the_manifest_lists_are_refused(tmp_path, published, kind, mode) -> None:
    directory, manifest = published
    changed, words = change(kind, load_file(directory / SHARD))
    save_file({name: tensor.contiguous() for name, tensor in changed.items()}, directory / SHARD)
    size = (directory / SHARD).stat().st_size
    files = {**manifest.files, SHARD: replace(manifest.files[SHARD], bytes=size)}
    lying = replace(manifest, files=files)  # sizes are right, so that the tensors themselves are compared
    (directory / "manifest.json").write_bytes(lying.to_json())
    error = refused((directory, lying), tmp_path / "local", mode)
    assert isinstance(error, MismatchError) and all(word in str(error) for word in words), error


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_version_with_other_tensors_than_the_server_has_is_refused(
    tmp_path, published, tensors, publish_alone, kind
) -> None:
    _, manifest = published
    changed, words = change(kind, tensors)
    other = publish_alone("v000005-r0", changed, 5)
    source = tmp_path / "weights" / "v000005-r0"
    fetch(source, other.digest, tmp_path / "elsewhere", visible_secs=0)
    with pytest.raises(MismatchError) as caught:
        fetch(source, other.digest, tmp_path / "local", visible_secs=0, expected=manifest)
    assert all(word in str(caught.value) for word in words) and "version 4" in str(caught.value)
    assert not (tmp_path / "local").exists(), "refused before a byte is copied"
    refuse_other_tensors(manifest, manifest, source)


def test_an_unlisted_weight_file_is_refused(tmp_path, published) -> None:
    directory, _ = published
    shutil.copy(directory / SHARD, directory / "model-00002-of-00002.safetensors")
    assert "model-00002-of-00002.safetensors" in str(refused(published, tmp_path / "local"))


def test_a_manifest_cannot_name_files_elsewhere(tmp_path, published) -> None:
    directory, manifest = published
    evil = replace(manifest, files={**manifest.files, "../../secret": manifest.files[SHARD]})
    (directory / "manifest.json").write_bytes(evil.to_json())
    with pytest.raises(WeightsError, match="outside of its directory"):
        read_manifest(directory, evil.digest)


def test_another_manifest_than_the_announced_one_is_refused(tmp_path, published) -> None:
    directory, manifest = published
    (directory / "manifest.json").write_bytes(replace(manifest, version=5).to_json())
    assert manifest.digest in str(refused(published, tmp_path / "local"))


@pytest.mark.parametrize("late", ["manifest.json", SHARD, "whole directory", "half a shard"])
def test_what_a_shared_file_system_shows_late_is_waited_for(tmp_path, published, late) -> None:
    directory, manifest = published
    shelf = tmp_path / "shelf"
    asked = threading.Event()
    if late == "whole directory":
        directory.rename(shelf)
    elif late == "half a shard":
        shutil.copy(directory / SHARD, shelf)
        os.truncate(directory / SHARD, 1000)
    else:
        (directory / late).rename(shelf)

    def appear() -> None:
        asked.wait(30)
        if late == "whole directory":
            shelf.rename(directory)
        elif late == "half a shard":
            shelf.replace(directory / SHARD)
        else:
            shelf.rename(directory / late)

    other_client = threading.Thread(target=appear)
    other_client.start()
    with pytest.raises(NotVisibleError):
        fetch(directory, manifest.digest, tmp_path / "local", visible_secs=0)
    asked.set()
    verify(fetch(directory, manifest.digest, tmp_path / "local", visible_secs=60), manifest)
    other_client.join()


def test_the_wait_for_visibility_ends(tmp_path, published) -> None:
    directory, manifest = published
    (directory / SHARD).unlink()
    start = time.monotonic()
    with pytest.raises(NotVisibleError, match="visible_secs"):
        fetch(directory, manifest.digest, tmp_path / "local", visible_secs=0.3)
    assert 0.3 <= time.monotonic() - start < 20


def test_concurrent_fetches_of_one_node_agree(tmp_path, published) -> None:
    directory, manifest = published
    answers: list[Path] = []
    threads = [
        threading.Thread(target=lambda: answers.append(fetch(directory, manifest.digest, tmp_path / "local")))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [tmp_path / "local" / "v000004-r0"] * 6
    assert [path.name for path in (tmp_path / "local").iterdir()] == ["v000004-r0"]
    verify(answers[0], manifest)


def test_a_full_node_says_so_and_keeps_nothing(tmp_path, published) -> None:
    directory, manifest = published
    script = (
        "import resource, sys; from pathlib import Path; from core.weights.fetch import fetch\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))\n"
        "try: fetch(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))\n"
        "except Exception as error: print(type(error).__name__, error)\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, directory, manifest.digest, tmp_path / "local"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith(DiskFullError.__name__) and "paths.local" in done.stdout
    assert done.stdout.endswith("False\n"), "fetching needs no torch"
    assert list((tmp_path / "local").iterdir()) == []


def test_a_checkpoint_that_lacks_a_shard_is_named(tmp_path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})
    )
    with pytest.raises(WeightsError, match=r"lacks model-00002-of-00002\.safetensors"):
        describe(tmp_path)
