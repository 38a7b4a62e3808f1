"""What every server must do for a run, asked of vLLM, SGLang and the embedded one alike."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import urllib3

from core.data.images import Picture
from core.inference.backends import CLIENTS
from core.inference.client import Generation, LoadRefusedError, ServerLostError
from core.rollout.servers import OVERBOOKED
from tests.servers.conftest import picture, publish_alone, tensors
from tests.servers.fleet import ask, fleet
from tests.servers.own_model import OwnModel
from tests.servers.served import LIMIT, TOKEN, Served

pytestmark = pytest.mark.timeout(700)
V1, V2, V3 = (f"v{number:06d}-r0" for number in (1, 2, 3))
Own = dict[str, OwnModel]

# bfloat16 keeps 8 bits: seen over 100 answers of this model, a mean of 0.02 and 0.15 at most
MEAN, MOST = 0.04, 0.3
TIE = 0.25  # of two logits closer than this, bfloat16 may take either


def prompt(own: OwnModel, *, images: int, length: int = 12, seed: int = 0) -> list[int]:
    """Random text with ONE placeholder for each image, between the marks that the chat template puts around it."""
    text = np.random.default_rng(seed).integers(3, 400, length).tolist()
    start, end = own.marks
    for number in range(images):
        text[2 + 6 * number : 2 + 6 * number] = [start, own.args.image_token_id, end]
    return text


def close(served: Served, told: Sequence[float], expected: np.ndarray, what: str = "") -> None:
    difference = np.abs(np.array(told) - expected)
    mean, most = (2e-4, 2e-3) if served.precise else (MEAN, MOST)
    assert difference.mean() <= mean and difference.max() <= most, (what, difference.mean(), difference.max())


def same_greedy(
    served: Served, own: OwnModel, ids: Sequence[int], pictures: Sequence[Picture], output: Sequence[int]
) -> None:
    """Each token is the likeliest one, up to a tie."""
    logits = own.logits(ids, pictures, output)
    logits[:, list(served.banned)] = -np.inf
    behind = logits.max(dim=1).values - logits[range(len(output)), list(output)]
    assert float(behind.max()) <= (1e-3 if served.precise else TIE), behind
    if not served.precise:
        assert int((behind == 0).sum()) >= 0.8 * len(output), behind


@pytest.mark.parametrize("sizes", [[(37, 53)], [(113, 29)], [(200, 90), (31, 31)]], ids=["odd", "wide", "two"])
def test_expanded_ids_are_the_ones_that_are_trained(served: Served, own: Own, sizes: list[tuple[int, int]]) -> None:
    served.be_on(V1)
    pictures = [picture(width, height, seed) for seed, (width, height) in enumerate(sizes)]
    ids = prompt(own[V1], images=len(sizes))
    answer = served.ask(ids, pictures)
    assert answer.prompt_ids == own[V1].expand(ids, pictures)
    assert len(answer.output_ids) == len(answer.logprobs) == len(answer.versions) == 8
    assert set(answer.versions) == {1}


def test_text_alone_is_answered(served: Served, own: Own) -> None:
    served.be_on(V1)
    ids = prompt(own[V1], images=0)
    answer = served.ask(ids, temperature=1.0)
    assert answer.prompt_ids == ids
    close(served, answer.logprobs, own[V1].logprobs(ids, [], answer.output_ids, banned=served.banned))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_distribution_sampled_from(served: Served, own: Own, temperature: float) -> None:
    served.be_on(V1)
    pictures = [picture(90, 61, 3), picture(45, 45, 4)]
    ids = prompt(own[V1], images=2, seed=5)
    answer = served.ask(ids, pictures, temperature=temperature, max_new_tokens=48)
    expected = own[V1].logprobs(ids, pictures, answer.output_ids, temperature=temperature, banned=served.banned)
    close(served, answer.logprobs, expected)
    other = own[V1].logprobs(ids, pictures, answer.output_ids, temperature=2.0, banned=served.banned)
    assert np.abs(np.array(answer.logprobs) - other).mean() > 0.3


def test_what_is_banned_carries_mass_that_goes_to_the_rest(served: Served, own: Own) -> None:
    """Stop ids before min_new_tokens are at -inf: banned mass is shared out among the others."""
    served.be_on(V1)
    ids = prompt(own[V1], images=0, seed=6)
    first = served.ask(ids, max_new_tokens=1).output_ids[0]
    answer = served.ask(
        ids, temperature=0.7, max_new_tokens=12, min_new_tokens=12, stop_token_ids=[first], ignore_eos=False
    )
    assert first not in answer.output_ids and len(answer.output_ids) == 12
    ending = sorted({first, *own[V1].args.eos_token_ids})
    expected = own[V1].logprobs(
        ids, [], answer.output_ids, temperature=0.7, banned=served.banned, banned_early=ending, early=12
    )
    close(served, answer.logprobs, expected)


def test_greedy_tokens_are_our_own_models(served: Served, own: Own) -> None:
    served.be_on(V1)
    pictures = [picture(60, 80, 7)]
    ids = prompt(own[V1], images=1, seed=7)
    answer = served.ask(ids, pictures, max_new_tokens=24)
    same_greedy(served, own[V1], ids, pictures, answer.output_ids)


def test_a_group_is_answered_at_once_and_each_answer_is_its_own(served: Served, own: Own) -> None:
    served.be_on(V1)
    pictures = [picture(50, 70, 8)]
    ids = prompt(own[V1], images=1, seed=8)
    flights = [served.start(ids, pictures, temperature=1.0, max_new_tokens=16) for _ in range(2 * LIMIT)]
    answers = [flight.result() for flight in flights]
    assert len({tuple(answer.output_ids) for answer in answers}) > LIMIT
    for answer in answers:
        assert answer.finish_reason == "length" and answer.prompt_ids == own[V1].expand(ids, pictures)
    for answer in answers[:3]:
        close(served, answer.logprobs, own[V1].logprobs(ids, pictures, answer.output_ids, banned=served.banned))


def test_stop_reasons(served: Served, own: Own) -> None:
    served.be_on(V1)
    ids = prompt(own[V1], images=0, seed=9)
    free = served.ask(ids, max_new_tokens=6)
    assert free.finish_reason == "length"
    last = free.output_ids[3]
    stopped = served.ask(ids, max_new_tokens=6, stop_token_ids=[last], ignore_eos=False)
    end = free.output_ids.index(last) + 1
    assert stopped.finish_reason == "stop" and stopped.stop_matched == last
    assert stopped.output_ids == free.output_ids[:end] and len(stopped.logprobs) == end


def test_an_aborted_request_comes_back_and_goes_on_from_its_tokens(served: Served, own: Own) -> None:
    served.be_on(V1)
    pictures = [picture(64, 64, 10)]
    ids = prompt(own[V1], images=1, seed=10)
    flight = served.start(ids, pictures, max_new_tokens=1500)
    flight.wait_for_tokens(5)
    served.loop.run(served.client.abort(flight.request.rid))
    try:
        answer = flight.result()
        assert not answer.finished, answer.finish_reason
    except ServerLostError:
        answer = flight.partial
    assert 5 <= len(answer.output_ids) < 1500
    assert len(answer.output_ids) == len(answer.logprobs) == len(answer.versions)
    rest = served.ask([*ids, *answer.output_ids], pictures, max_new_tokens=6)
    assert rest.prompt_ids == [*own[V1].expand(ids, pictures), *answer.output_ids]
    whole = [*answer.output_ids, *rest.output_ids][-48:]
    before = [*answer.output_ids, *rest.output_ids][: -len(whole)]
    same_greedy(served, own[V1], [*ids, *before], pictures, whole)


def test_an_update_in_flight_changes_the_version_and_nothing_before_it(served: Served, own: Own) -> None:
    served.be_on(V1)
    pictures = [picture(56, 84, 11)]
    ids = prompt(own[V1], images=1, seed=11)
    flights = [served.start(ids, pictures, temperature=1.0, max_new_tokens=400) for _ in range(3)]
    for flight in flights:
        flight.wait_for_tokens(4)
    served.update(V2)
    assert served.version() == V2
    fresh = served.ask(ids, pictures)
    assert set(fresh.versions) == {2}
    for flight in flights:
        answer = flight.result()
        assert answer.finished and len(answer.output_ids) == 400
        _check_spans(served, own, ids, pictures, answer)


def _check_spans(served: Served, own: Own, ids: list[int], pictures: list[Picture], answer: Generation) -> None:
    """Old tokens under the old weights, new ones under the new, as if the rest had been asked for afresh."""
    versions = np.array(answer.versions)
    assert set(answer.versions) == {1, 2} and (np.diff(versions) >= 0).all()
    change = int((versions == 1).sum())
    old = own[V1].logprobs(ids, pictures, answer.output_ids[:change], banned=served.banned)
    close(served, answer.logprobs[:change], old, "before the update")
    new = own[V2].logprobs(ids, pictures, answer.output_ids, banned=served.banned)[change:]
    close(served, answer.logprobs[change:], new, "after the update")


def test_a_new_tower_is_seen_at_once_on_a_picture_seen_before(served: Served, own: Own) -> None:
    served.be_on(V2)
    pictures = [picture(100, 60, 12)]
    ids = prompt(own[V2], images=1, seed=12)
    for name in (V2, V3, V2):
        served.be_on(name)
        answer = served.ask(ids, pictures, temperature=1.0, max_new_tokens=24)
        close(served, answer.logprobs, own[name].logprobs(ids, pictures, answer.output_ids, banned=served.banned), name)
        other = own[V2 if name == V3 else V3].logprobs(ids, pictures, answer.output_ids, banned=served.banned)
        assert np.abs(np.array(answer.logprobs) - other).mean() > (MEAN if not served.precise else 0.01)


def missing(source: Path, place: Path) -> Path:
    return place / "never-written"


def truncated(source: Path, place: Path) -> Path:
    target = Path(shutil.copytree(source, place / source.name))
    file = max(target.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-100])
    return target


def torn(source: Path, place: Path) -> Path:
    target = Path(shutil.copytree(source, place / source.name))
    next(iter(sorted(target.glob("*.safetensors")))).unlink()
    return target


def mismatched(source: Path, place: Path) -> Path:
    content = tensors(source)
    name = next(name for name in content if "mlp.up_proj" in name)
    content[name] = content[name][:-1].clone()
    return publish_alone(place, 9, content, source)


@pytest.mark.parametrize("broken", [missing, truncated, torn, mismatched], ids=lambda make: make.__name__)
def test_what_is_not_whole_is_refused_and_the_old_weights_are_served(
    served: Served, own: Own, tmp_path: Path, broken: object
) -> None:
    served.be_on(V1)
    assert callable(broken)
    root = next(iter(served.versions.values())).parent / f"broken-{broken.__name__}-{served.backend}"
    root.mkdir()
    ids, pictures = prompt(own[V1], images=1, seed=13), [picture(64, 32, 13)]
    served.versions["broken"] = broken(served.versions[V1], root)
    with pytest.raises(LoadRefusedError):
        served.update("broken")
    assert served.version() == V1
    answer = served.ask(ids, pictures, temperature=1.0)
    assert set(answer.versions) == {1}
    close(served, answer.logprobs, own[V1].logprobs(ids, pictures, answer.output_ids, banned=served.banned))


def test_only_the_run_may_ask_and_only_for_what_a_run_needs(served: Served) -> None:
    http = urllib3.PoolManager()

    def status(method: str, path: str, token: str | None, body: dict | None = None) -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        return http.request(method, served.url + path, json=body, headers=headers, timeout=30, retries=False).status

    asked = "/inference/v1/generate" if served.backend == "vllm" else "/generate"
    assert status("POST", asked, None, {}) == 401
    assert status("POST", asked, "wrong", {}) == 401
    if served.backend == "embedded":
        return
    for path in ("/collective_rpc", "/update_weights_from_tensor", "/start_profile", "/reset_weights", "/sleep"):
        assert status("POST", path, None, {}) == 401
        assert status("POST", path, TOKEN, {}) in (400, 403)
    assert status("POST", "/collective_rpc", TOKEN, {"method": "reset_weights"}) in (400, 403)


def test_256_long_requests_on_a_limit_of_4_restart_nobody(served: Served) -> None:
    """The pool knows how many the server runs at once, holds the others back, and does not take a queue for silence.

    Working through them takes longer than the deadline for a silent server.
    """
    tokens = 100 if served.precise else 16

    async def scenario() -> None:
        limit = {"max_num_seqs": LIMIT} if served.backend == "vllm" else {}
        async with fleet(
            [served.url], served.versions, client=lambda url: CLIENTS[served.backend](url, TOKEN, **limit)
        ) as made:
            assert made.pool.most_requests() == OVERBOOKED * LIMIT
            answers = await asyncio.gather(*(ask(made.pool, number, tokens) for number in range(256)))
            assert all(len(answer.output_ids) == tokens and set(answer.versions) == {1} for answer in answers)
            assert made.restarted == [] and made.pool.losses == 0

    asyncio.run(asyncio.wait_for(scenario(), 300))
    served.on = V1
