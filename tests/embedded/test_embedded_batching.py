"""Requests join and leave between tokens, share what they can, and disturb nobody."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from core.inference.embedded.request import Request
from core.inference.embedded.server import EmbeddedServer
from tests.embedded.harness import build, engine_request, logprobs, picture, serving


@pytest.fixture
def server(checkpoints: dict[str, Path]) -> EmbeddedServer:
    """Its batch is stepped by the test; the engine is not started."""
    return build(checkpoints["text"], max_running_requests=4)


def steps(server: EmbeddedServer, count: int = 10**6) -> None:
    with torch.inference_mode():
        for _ in range(count):
            if not server.engine.batch.waiting and not server.engine.batch.running:
                return
            server.engine.batch.step("0")


def alone(checkpoints: dict[str, Path], name: str, rid: str, ids: list[int], **sampling: object) -> Request:
    server = build(checkpoints[name])
    request = engine_request(server, rid, ids, **sampling)
    server.engine.batch.waiting.append(request)
    steps(server)
    return request


def test_requests_join_and_leave_between_tokens(server: EmbeddedServer, checkpoints: dict[str, Path]) -> None:
    batch = server.engine.batch
    rng = np.random.default_rng(0)
    lengths = [9, 3, 20, 5, 1, 7, 12]
    asked = [
        (f"r{i}", rng.integers(0, 250, 3 + 5 * i).tolist(), {"max_new_tokens": n, "sampling_seed": i})
        for i, n in enumerate(lengths)
    ]
    requests = [engine_request(server, rid, ids, **sampling) for rid, ids, sampling in asked]
    batch.waiting.extend(requests[:2])
    steps(server, 2)
    assert [len(r.output_ids) for r in requests[:2]] == [2, 2]
    batch.waiting.extend(requests[2:])
    steps(server, 1)
    assert requests[1].done and not requests[0].done, "the short one has left while the long one runs"
    assert [len(r.output_ids) for r in requests] == [3, 3, 1, 1, 0, 0, 0], "four slots: the others wait"
    steps(server, 1)
    assert len(requests[4].output_ids) == 1, "it took the slot of the one that left"
    steps(server)
    for (rid, ids, sampling), request in zip(asked, requests, strict=True):
        single = alone(checkpoints, "text", rid, ids, **sampling)
        assert request.output_ids == single.output_ids
        np.testing.assert_allclose(request.logprobs, single.logprobs, atol=1e-5)
        assert request.finish == {"type": "length", "length": sampling["max_new_tokens"]}


def test_prefill_is_bounded_by_tokens(checkpoints: dict[str, Path]) -> None:
    server = build(checkpoints["text"], max_prefill_tokens=50)
    requests = [engine_request(server, str(i), [i] * 20, max_new_tokens=5) for i in range(6)]
    server.engine.batch.waiting.extend(requests)
    joined = []
    while server.engine.batch.waiting:
        steps(server, 1)
        joined.append(sum(1 for r in requests if r.output_ids))
    assert joined == [2, 4, 6], "two of 20 tokens fit into 50"
    long = engine_request(server, "long", [3] * 200, max_new_tokens=2)
    server.engine.batch.waiting.append(long)
    steps(server)
    assert long.done, "one longer than the bound goes alone"


def test_a_group_shares_one_prefill(checkpoints: dict[str, Path]) -> None:
    with serving(checkpoints["vision"]) as remote, ThreadPoolExecutor(8) as clients:
        image = remote.image
        ids = [5, image, 6, 7]
        pictures = [picture(84, 84, 1)]

        def ask(seed: int) -> dict:
            return remote.generate(ids, pictures, max_new_tokens=6, temperature=1.0, sampling_seed=seed)

        group = list(clients.map(ask, range(8)))
        counters = remote.server.counters()
        assert counters["prefilled_tokens"] == 3 + 9, "the prompt went through the model once"
        assert counters["images_decoded"] == 1
        assert len({tuple(answer["output_ids"]) for answer in group}) > 1
        remote.post("/flush_cache")
        again = [ask(seed) for seed in range(8)]
        assert [a["output_ids"] for a in again] == [a["output_ids"] for a in group]
        for one, other in zip(group, again, strict=True):
            np.testing.assert_allclose(logprobs(one), logprobs(other), atol=1e-5)
        other_picture = remote.generate(ids, [picture(84, 84, 2)], max_new_tokens=6)
        assert other_picture["meta_info"]["cached_tokens"] == 0, "same ids, other picture: another prompt"
        assert again[1]["meta_info"]["cached_tokens"] == 12


def test_deterministic_mode_gives_the_same_bits_in_any_company(checkpoints: dict[str, Path]) -> None:
    rng = np.random.default_rng(3)
    image_ids = [(rng.integers(0, 250, 4 + i).tolist(), [picture(56 + 28 * (i % 3), 84, i)]) for i in range(6)]
    with serving(checkpoints["vision"], deterministic=True) as remote, ThreadPoolExecutor(6) as clients:
        image = remote.image

        def ask(number: int) -> dict:
            ids, pictures = image_ids[number]
            return remote.generate([*ids, image, 9], pictures, max_new_tokens=10, temperature=1.0, sampling_seed=number)

        crowd = list(clients.map(ask, range(6)))
    with serving(checkpoints["vision"], deterministic=True) as remote:
        single = [ask(number) for number in (3, 0, 5, 1, 2, 4)]
    for number, answer in zip((3, 0, 5, 1, 2, 4), single, strict=True):
        assert answer["output_ids"] == crowd[number]["output_ids"]
        assert logprobs(answer) == logprobs(crowd[number]), "bit for bit"


def test_memory_grows_with_need_and_is_given_back(server: EmbeddedServer) -> None:
    batch = server.engine.batch
    batch.waiting.append(engine_request(server, "a", [1, 2, 3], max_new_tokens=4))
    steps(server, 1)
    small = batch.slots.bytes
    batch.waiting.append(engine_request(server, "b", [1] * 300, max_new_tokens=4))
    steps(server, 1)
    assert 0 < small < batch.slots.bytes
    steps(server)
    batch.forget()
    assert batch.slots.bytes == 0


def test_sixteen_at_once_are_many_times_as_fast_as_one(checkpoints: dict[str, Path]) -> None:
    """The bench asks for four times; here half of it, on a machine that may be busy with other tests."""
    server = build(checkpoints["text"])
    server.engine.start()

    def tokens_per_second(count: int) -> float:
        left = threading.Semaphore(0)
        requests = [
            engine_request(server, f"{count}-{i}-{time.monotonic_ns()}", [i + 1, 2, 3], max_new_tokens=60)
            for i in range(count)
        ]
        start = time.perf_counter()
        for request in requests:
            request.notify = lambda _: left.release()
            server.engine.submit(request)
        for _ in requests:
            assert left.acquire(timeout=60)
        return count * 60 / (time.perf_counter() - start)

    try:
        tokens_per_second(16)
        single = max(tokens_per_second(1) for _ in range(3))
        many = max(tokens_per_second(16) for _ in range(3))
    finally:
        server.engine.stop()
    assert many >= 2 * single, (many, single)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_serve_too(checkpoints: dict[str, Path], dtype: torch.dtype) -> None:
    exact = {torch.bfloat16: 0.1, torch.float64: 1e-5}[dtype]
    with serving(checkpoints["vision"]) as remote:
        image = remote.image
        question = ([3, image, 4], [picture(84, 56, 3)])
        expected = remote.generate(*question, max_new_tokens=1)
    with serving(checkpoints["vision"], dtype=dtype) as remote:
        answer = remote.generate(*question, max_new_tokens=3, ignore_eos=True)
        assert len(answer["output_ids"]) == 3
        assert abs(logprobs(answer)[0] - logprobs(expected)[0]) < exact


@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_joining_leaving_and_retracting_changes_an_answer(checkpoints: dict[str, Path], seed: int) -> None:
    """Random arrivals, removals and retractions: whoever ends has the tokens that it would have had alone."""
    rng = np.random.default_rng(seed)
    server = build(checkpoints["text"], max_running_requests=5, max_prefill_tokens=60)
    batch = server.engine.batch
    prompts = [rng.integers(0, 250, int(rng.integers(1, 40))).tolist() for _ in range(8)]
    requests, removed = [], set()
    for number in range(24):
        sampling = {"max_new_tokens": int(rng.integers(1, 15)), "sampling_seed": number, "temperature": 1.3}
        requests.append((prompts[int(rng.integers(8))], sampling))
    made = [engine_request(server, str(i), ids, **sampling) for i, (ids, sampling) in enumerate(requests)]
    ahead = list(made)
    for _ in range(400):
        batch.waiting.extend(ahead[: (joins := int(rng.integers(0, 3)))])
        del ahead[:joins]
        if rng.random() < 0.1:
            batch.retract()
        if rng.random() < 0.1 and (here := [*batch.waiting, *batch.running]):
            gone = here[int(rng.integers(len(here)))]
            with torch.inference_mode():  # as in the engine's thread
                batch.remove(gone)
            removed.add(gone.rid)
        steps(server, 1)
        assert len(batch.running) <= 5
    assert not ahead and not batch.waiting and not batch.running
    assert 0 < len(removed) < 20
    for request, (ids, sampling) in zip(made, requests, strict=True):
        expected = alone(checkpoints, "text", "x", ids, **sampling)
        count = len(request.output_ids)
        assert request.done or request.rid in removed
        assert request.output_ids == expected.output_ids[:count]
        np.testing.assert_allclose(request.logprobs, expected.logprobs[:count], atol=1e-5)
