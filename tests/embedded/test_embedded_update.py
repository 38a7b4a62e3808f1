"""Weights change with requests in flight, or not at all."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.embedded.harness import Reference, Remote, logprobs, picture, serving, spans


class Streamed:
    """One streamed request in a thread, whose tokens can be waited for."""

    def __init__(self, remote: Remote, ids: list[int], images: list, **sampling: Any) -> None:
        self.last: dict[str, Any] = {}
        self.arrived = threading.Condition()
        self.thread = threading.Thread(target=self._read, args=(remote.stream(ids, images, **sampling),))
        self.thread.start()

    def _read(self, chunks: Iterator[dict]) -> None:
        for chunk in chunks:
            with self.arrived:
                self.last = chunk
                self.arrived.notify_all()

    def await_tokens(self, count: int) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.last.get("output_ids", [])) >= count, 60)

    def end(self) -> dict[str, Any]:
        self.thread.join(60)
        assert not self.thread.is_alive()
        return self.last


LONG = 150
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def long(checkpoints: dict[str, Path]) -> Iterator[Remote]:
    with serving(checkpoints["vision"], context_length=1024) as served:
        served.post("/update_weights_from_disk", model_path=str(checkpoints["vision"]), weight_version="1")
        yield served


def test_requests_in_flight_go_on_under_the_new_weights(long: Remote, checkpoints: dict[str, Path]) -> None:
    image = long.image
    asked: list[tuple[list[int], list[Image.Image]]] = [
        ([3, image, 4, 5], [picture(84, 84, 1)]),
        ([9, 8, 7], []),
        ([3, image, 4, 6, 6], [picture(56, 112, 2)]),
    ]
    before = [long.generate(ids, images, max_new_tokens=LONG, ignore_eos=True) for ids, images in asked]
    flying = [Streamed(long, ids, images, max_new_tokens=LONG, ignore_eos=True) for ids, images in asked]
    for request in flying:
        request.await_tokens(3)
    long.post("/pause_generation", mode="retract")
    assert long.get("/status")["state"] == "paused"
    answer = long.post("/update_weights_from_disk", model_path=str(checkpoints["vision_after"]), weight_version="2")
    assert answer["success"] and answer["num_paused_requests"] == 3
    with ThreadPoolExecutor(1) as client:
        late = client.submit(long.generate, [1, 2], max_new_tokens=3)  # sent while paused: waits
        long.post("/continue_generation")
        ends = [request.end() for request in flying]
        assert spans(late.result(60)) == [("2", 0, 3)]
    with serving(checkpoints["vision_after"], context_length=1024) as fresh:
        for (ids, images), old, end in zip(asked, before, ends, strict=True):
            (first, zero, cut), (second, start, total) = spans(end)
            assert (first, zero, second, start, total) == ("1", 0, "2", cut, LONG), spans(end)
            assert 3 <= cut < LONG
            assert end["meta_info"]["weight_version"] == "2"
            assert end["output_ids"][:cut] == old["output_ids"][:cut]
            resumed = fresh.generate(
                [*ids, *end["output_ids"][:cut]], images, max_new_tokens=LONG - cut, ignore_eos=True
            )
            assert end["output_ids"][cut:] == resumed["output_ids"], "as a fresh request with the partial ids"
            np.testing.assert_allclose(logprobs(end)[cut:], logprobs(resumed), atol=1e-5)
            assert end["output_ids"] != old["output_ids"], "the new weights matter"


def test_nothing_cached_outlives_the_weights(remote: Remote, checkpoints: dict[str, Path]) -> None:
    """The picture was seen and the prompt cached under the old weights: answers are the new model's all the same."""
    image = remote.image
    ids, images = [5, image, 6], [picture(84, 84, 7)]
    old = remote.generate(ids, images, max_new_tokens=12)
    assert old["output_ids"] == Reference(checkpoints["vision"]).greedy(ids, images, 12)
    for mode in ("retract", "abort", "in_place"):
        remote.post("/pause_generation", mode=mode)
        remote.post("/update_weights_from_disk", model_path=str(checkpoints["vision_after"]), weight_version="8")
        remote.post("/continue_generation")
        new = remote.generate(ids, images, max_new_tokens=12)
        assert new["output_ids"] == Reference(checkpoints["vision_after"]).greedy(ids, images, 12)
        assert spans(new)[0][0] == "8"
        remote.post("/update_weights_from_disk", model_path=str(checkpoints["vision"]), weight_version="9")
        assert remote.generate(ids, images, max_new_tokens=12)["output_ids"] == old["output_ids"]


def test_without_a_pause_a_load_waits_for_what_runs(long: Remote, checkpoints: dict[str, Path]) -> None:
    flying = Streamed(long, [1, 2, 3], [], max_new_tokens=LONG, ignore_eos=True)
    flying.await_tokens(1)
    with ThreadPoolExecutor(2) as clients:
        update = clients.submit(
            long.post, "/update_weights_from_disk", model_path=str(checkpoints["vision_after"]), weight_version="2"
        )
        assert update.result(60)["success"]
        assert spans(flying.end()) == [("1", 0, LONG)]
    assert spans(long.generate([1, 2, 3], max_new_tokens=2)) == [("2", 0, 2)]


def test_abort_returns_what_was_sampled(long: Remote, checkpoints: dict[str, Path]) -> None:
    flying = [Streamed(long, [i, 2, 3], [], max_new_tokens=LONG, ignore_eos=True) for i in range(3)]
    for request in flying:
        request.await_tokens(2)
    long.post("/pause_generation", mode="abort")
    for request in flying:
        end = request.end()
        assert end["meta_info"]["finish_reason"]["type"] == "abort"
        count = len(end["output_ids"])
        assert 2 <= count < LONG and spans(end) == [("1", 0, count)] and len(logprobs(end)) == count
    answer = long.post(
        "/update_weights_from_disk",
        model_path=str(checkpoints["vision_after"]),
        weight_version="2",
        abort_all_requests=True,
    )
    assert answer["num_paused_requests"] == 0


def test_in_place_keeps_keys_and_values_only_when_told_so(long: Remote, checkpoints: dict[str, Path]) -> None:
    flying = Streamed(long, [4, 5, 6], [], max_new_tokens=LONG, ignore_eos=True)
    flying.await_tokens(2)
    long.post("/pause_generation", mode="in_place")
    body = {"model_path": str(checkpoints["vision_after"]), "weight_version": "2"}
    status, answer = long.call("POST", "/update_weights_from_disk", body)
    assert status == 400 and not answer["success"] and "flush_cache" in answer["message"]
    assert long.get("/model_info")["weight_version"] == "1", "refused means unchanged"
    assert long.post("/update_weights_from_disk", **body, flush_cache=False)["success"]
    long.post("/continue_generation")
    (one, _, cut), (two, start, total) = spans(flying.end())
    assert (one, two, start, total) == ("1", "2", cut, LONG)


def damage(kind: str, good: Path, bad: Path) -> str:
    """A copy of a checkpoint with one fault; returns what the refusal must name."""
    shutil.copytree(good, bad)
    index = json.loads((bad / "model.safetensors.index.json").read_text())
    name = "model.layers.0.mlp.up_proj.weight"
    file = bad / index["weight_map"][name]
    if kind == "no directory":
        shutil.rmtree(bad)
        return bad.name
    if kind == "lacks a file":
        file.unlink()
        return file.name
    if kind == "truncated":
        file.write_bytes(file.read_bytes()[:-5])
        return file.name
    tensors = load_file(file)
    if kind == "missing":
        del tensors[name]
    elif kind == "extra":
        tensors["model.layers.7.mlp.up_proj.weight"] = tensors[name].clone()
        name = "model.layers.7.mlp.up_proj.weight"
    elif kind == "other head":
        name = "lm_head.weight"
        tensors[name] = torch.zeros_like(load_file(bad / index["weight_map"][EMBEDDING])[EMBEDDING])
        index["weight_map"][name] = file.name
        (bad / "model.safetensors.index.json").write_text(json.dumps(index))
    elif kind == "renamed":
        tensors["model.layers.0.mlp.upp_proj.weight"] = tensors.pop(name)
    else:
        tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, file)
    return name


@pytest.mark.parametrize(
    "kind", ["no directory", "lacks a file", "truncated", "missing", "extra", "renamed", "shape", "other head"]
)
def test_what_does_not_fit_is_refused_and_nothing_changes(
    remote: Remote, checkpoints: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    image = remote.image
    question = ([3, image, 4], [picture(84, 56, 3)])
    before = remote.generate(*question, max_new_tokens=10)
    fault = damage(kind, checkpoints["vision_after"], tmp_path / "bad")
    body = {"model_path": str(tmp_path / "bad"), "weight_version": "5"}
    status, answer = remote.call("POST", "/update_weights_from_disk", body)
    assert status == 400 and answer["success"] is False
    assert fault in answer["message"], answer
    remote.post("/flush_cache")
    after = remote.generate(*question, max_new_tokens=10)
    assert after["output_ids"] == before["output_ids"] and logprobs(after) == logprobs(before)
    assert remote.get("/model_info")["weight_version"] == "-1"
    good = {"model_path": str(checkpoints["vision_after"]), "weight_version": "6"}
    assert remote.post("/update_weights_from_disk", **good)["success"]


def test_the_same_weights_loaded_twenty_times_change_no_bit(remote: Remote, checkpoints: dict[str, Path]) -> None:
    image = remote.image
    question = ([3, image, 4], [picture(84, 56, 3)])
    first = remote.generate(*question, max_new_tokens=10, temperature=1.0, sampling_seed=3)
    for version in range(20):
        remote.post("/pause_generation", mode="retract")
        remote.post("/update_weights_from_disk", model_path=str(checkpoints["vision"]), weight_version=str(version))
        remote.post("/continue_generation")
        answer = remote.generate(*question, max_new_tokens=10, temperature=1.0, sampling_seed=3)
        assert answer["output_ids"] == first["output_ids"] and logprobs(answer) == logprobs(first)
        assert spans(answer) == [(str(version), 0, len(answer["output_ids"]))]
