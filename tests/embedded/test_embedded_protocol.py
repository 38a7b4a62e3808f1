"""SGLang's routes: what they take, what they refuse, and what becomes of a request whose client goes away."""

from __future__ import annotations

import base64
import itertools
import time
from pathlib import Path

import pytest

from tests.embedded.harness import TOKEN, Remote, data_url, generate_body, picture, serving, spans


def refusal(remote: Remote, body: dict) -> str:
    status, answer = remote.call("POST", "/generate", body)
    assert status == 400, answer
    return answer["error"]["message"]


def test_one_placeholder_per_image(remote: Remote) -> None:
    image = remote.image
    one = [picture(84, 84, 0)]
    for ids, images in (([1, image, image], one), ([1, 2], one), ([1, image], []), ([image] * 9, one)):
        message = refusal(remote, generate_body(ids, images))
        assert "ONE placeholder per image" in message
    video = remote.video
    assert "video" in refusal(remote, generate_body([video]))
    answer = remote.generate([1, image, 2], one, max_new_tokens=1)
    assert answer["prompt_token_ids"] == [1, *[image] * 9, 2] and answer["meta_info"]["image_tokens"] == 9


def test_the_context_is_a_clear_limit(remote: Remote) -> None:
    message = refusal(remote, generate_body([1] * 500, max_new_tokens=13))
    assert "500 prompt tokens" in message and "512" in message and "embedded.context_length" in message
    assert len(remote.generate([1] * 500, max_new_tokens=12, ignore_eos=True)["output_ids"]) == 12
    image = remote.image
    message = refusal(remote, generate_body([1, image], [picture(28 * 23, 28 * 23, 0)], max_new_tokens=1))
    assert f"{1 + 23 * 23} prompt tokens" in message, "images count expanded"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_ids": []}, "empty"),
        ({"input_ids": None}, "input_ids"),
        ({"input_ids": [[1, 2], [3]]}, "no batch"),
        ({"input_ids": [1, -2]}, "-2"),
        ({"input_ids": [1, 512]}, "512"),
        ({"input_ids": [1, "2"]}, "'2'"),
        ({"input_ids": [1, 2.5]}, "2.5"),
        ({"sampling_params": 3}, "sampling_params"),
        ({"sampling_params": {"temperature": 0, "stop": "x"}}, "stop"),
        ({"rid": 5}, "rid"),
    ],
)
def test_malformed_requests_are_named(remote: Remote, change: dict, words: str) -> None:
    assert words in refusal(remote, {**generate_body([1, 2]), **change})


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("data:image/png;base64,AAAA", "image_data[0]"),
        ("http://example.org/x.png", "address"),
        ("not base64!", "base64"),
        ("data:image/png,raw", "data URL"),
        (7, "data URL or base64"),
    ],
)
def test_a_picture_that_cannot_be_read_is_named(remote: Remote, source: object, words: str) -> None:
    image = remote.image
    body = {**generate_body([1, image]), "image_data": [source]}
    assert words in refusal(remote, body) and "image_data[0]" in refusal(remote, body)


def test_plain_base64_is_a_picture_too(remote: Remote) -> None:
    image = remote.image
    url = data_url(picture(84, 84, 0))
    by_url = remote.post("/generate", **{**generate_body([1, image], max_new_tokens=4), "image_data": [url]})
    plain = url.split(",")[1]
    assert base64.b64decode(plain)
    by_base64 = remote.post("/generate", **{**generate_body([1, image], max_new_tokens=4), "image_data": plain})
    assert by_url["output_ids"] == by_base64["output_ids"]


def test_every_route_but_health_wants_the_token(remote: Remote) -> None:
    routes = [route for route in remote.server._app.router.routes() if route.method in ("GET", "POST")]
    assert len(routes) >= 12
    for route in routes:
        assert route.resource is not None
        path = route.resource.canonical
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
            reply = remote.pool.request(route.method, remote.url + path, headers=headers, timeout=30, retries=False)
            assert reply.status == (200 if path == "/health" else 401), path


def test_bodies_that_are_no_json_are_refused(remote: Remote) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    for body in (b"{", b"[1]", b"\xff"):
        reply = remote.pool.request("POST", remote.url + "/generate", body=body, headers=headers, timeout=30)
        assert reply.status == 400, body


def test_streamed_chunks_are_cumulative_and_end_as_the_whole_answer(remote: Remote) -> None:
    image = remote.image
    question = ([1, image, 2], [picture(56, 56, 0)])
    whole = remote.generate(*question, max_new_tokens=300, ignore_eos=True)
    chunks = list(remote.stream(*question, max_new_tokens=300, ignore_eos=True))
    assert len(chunks) > 1
    for earlier, later in itertools.pairwise(chunks):
        count = len(earlier["output_ids"])
        assert later["output_ids"][:count] == earlier["output_ids"]
        assert len(earlier["meta_info"]["output_token_logprobs"]) == count == earlier["meta_info"]["completion_tokens"]
        assert spans(earlier) == [("-1", 0, count)]
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [c["meta_info"]["finish_reason"] for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["meta_info"]["finish_reason"]["type"] == "length"


def until(remote: Remote, **wanted: object) -> dict:
    deadline = time.monotonic() + 30
    while True:
        status = remote.get("/status")
        if all(status[key] == value for key, value in wanted.items()):
            return status
        assert time.monotonic() < deadline, status


def test_abort_request_ends_one_and_leaves_the_others(remote: Remote) -> None:
    ends = {rid: remote.stream([1, 2], rid=rid, max_new_tokens=400, ignore_eos=True) for rid in ("a", "b")}
    for stream in ends.values():
        next(stream)
    assert remote.post("/abort_request", rid="a") == {"aborted": 1}
    last = list(ends["a"])[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort" and last["meta_info"]["id"] == "a"
    assert len(list(ends["b"])[-1]["output_ids"]) == 400
    assert remote.post("/abort_request", rid="a") == {"aborted": 0}
    waiting = remote.stream([1, 2], max_new_tokens=400, ignore_eos=True)
    next(waiting)
    assert remote.post("/abort_request", abort_all=True) == {"aborted": 1}
    until(remote, running=0, waiting=0)


def test_a_client_that_goes_away_frees_its_place(checkpoints: dict[str, Path]) -> None:
    with serving(checkpoints["text"], context_length=30_000) as remote:
        stream = remote.stream([1, 2], max_new_tokens=29_000, ignore_eos=True)
        next(stream)
        until(remote, running=1)
        stream.close()
        assert until(remote, running=0)["sampled_tokens"] < 29_000


def test_a_request_id_is_in_flight_once(remote: Remote) -> None:
    stream = remote.stream([1, 2], rid="same", max_new_tokens=400, ignore_eos=True)
    next(stream)
    assert "'same'" in refusal(remote, generate_body([1], rid="same"))
    assert len(list(stream)[-1]["output_ids"]) == 400, "the first one is not disturbed"
    remote.generate([1], rid="same", max_new_tokens=1)


def test_health_is_a_generated_token(remote: Remote) -> None:
    assert remote.get("/health_generate") == {"ok": True}
    remote.post("/pause_generation", mode="retract")
    assert remote.call("GET", "/health_generate")[0] == 503
    assert remote.call("GET", "/health")[0] == 200
    assert remote.get("/model_info")["weight_version"] == "-1", "answers while paused"
    remote.post("/continue_generation")
    assert remote.get("/health_generate") == {"ok": True}
    status, _ = remote.call("POST", "/pause_generation", {"mode": "softly"})
    assert status == 400


def test_metrics_are_prometheus_text(remote: Remote) -> None:
    remote.generate([1, 2, 3], max_new_tokens=5, ignore_eos=True)
    reply = remote.pool.request(
        "GET", remote.url + "/metrics", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=30
    )
    lines = dict(line.split() for line in reply.data.decode().splitlines())
    assert float(lines["embedded_sampled_tokens"]) == 5 and float(lines["embedded_prefilled_tokens"]) == 3


def test_after_the_engine_has_died_every_request_hears_of_it(checkpoints: dict[str, Path]) -> None:
    with serving(checkpoints["text"], context_length=30_000) as remote:
        stream = remote.stream([1, 2], max_new_tokens=29_000, ignore_eos=True)
        next(stream)

        def fail() -> None:
            raise ZeroDivisionError("division")

        remote.server.engine._orders.put(fail)  # as a failure in the engine's own thread
        assert "division" in list(stream)[-1]["error"]["message"]
        assert remote.call("POST", "/generate", generate_body([1]))[0] == 503
        assert remote.call("GET", "/health")[0] == 503
        assert remote.call("GET", "/health_generate")[0] == 503
