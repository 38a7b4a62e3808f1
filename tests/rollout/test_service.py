"""The rollout service over HTTP among stubs: order, staleness, journal, update with requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.config.generation import Generation
from core.rl.trajectory import decode_samples
from core.rollout.admission import Limits
from core.rollout.batches import Batch
from core.rollout.collector import Collector
from core.rpc.errors import RpcError
from core.telemetry.files import read_lines
from tests.rollout.stub_run import Run, stub_run
from tests.rollout.stub_server import STOP, logprob_of, token_at


def driven(scenario: Callable[[Run], Awaitable[None]], root: Path, *overrides: str, **stubs: object) -> None:
    async def go() -> None:
        async with asyncio.timeout(60), stub_run(root, *overrides, **stubs) as run:  # type: ignore[arg-type]
            await scenario(run)

    asyncio.run(go())


def contents(body: bytes) -> list[dict[str, object]]:
    samples, _ = decode_samples(body)
    return [
        {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in vars(sample).items()}
        for sample in samples
    ]


def test_a_batch_holds_the_first_prompts_in_order_and_what_the_server_sampled(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        assert await run.batch(1, wait=0.3) == {"ready": False}
        assert run.data.asked == [] and not run.servers[0].requests, "nothing before the first publish"
        await run.serve(0)
        index = await run.batch(1)
        assert index["ready"] and not index["end"] and index["step"] == 1
        assert [row["group"] for row in index["samples"]] == [0, 0, 1, 1]
        samples, _ = decode_samples(await run.samples(1, [0, 1, 2, 3]))
        assert [sample.sample_id for sample in samples] == ["0-0-0", "0-0-1", "0-1-0", "0-1-1"]
        seeds = {
            request["rid"].rsplit("-", 3)[0]: request["sampling_params"] for s in run.servers for request in s.requests
        }
        for row, sample in zip(index["samples"], samples, strict=True):
            prompt = run.data.prompt("train", 0, int(sample.group_id.split("-")[1]))
            assert sample.prompt_ids.tolist() == prompt["expanded_ids"]
            seed, start = seeds[sample.sample_id]["sampling_seed"], len(prompt["expanded_ids"])
            assert sample.sampled_ids.tolist() == [token_at(seed, start), token_at(seed, start + 1), STOP]
            assert sample.logprobs.tolist() == pytest.approx([logprob_of(t) for t in sample.sampled_ids.tolist()])
            assert sample.versions.tolist() == [0, 0, 0] and sample.finish_reason == "stop"
            assert row["length"] == start + 3 and row["prompt_length"] == start
            assert row["patches"] == 4 * prompt["expanded_ids"].count(5) and row["images"] == [
                prompt["images"][0]["hash"]
            ]
        assert seeds["0-0-0"]["sampling_seed"] != seeds["0-0-1"]["sampling_seed"]
        assert seeds["0-0-0"]["logit_bias"] == {"5": -1e9, "6": -1e9}
        subset, header = decode_samples(await run.samples(1, [2]))
        assert [sample.sample_id for sample in subset] == ["0-1-0"] and header["step"] == 1

    driven(scenario, tmp_path)


def test_zero_offpolicyness_is_synchronous(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        for step in range(1, 4):
            await run.serve(step - 1)
            index = await run.batch(step)
            assert index["stats"]["staleness_max"] == 0
            assert await run.batch(step + 1, wait=0.1) == {"ready": False}
            assert sum(len(server.requests) for server in run.servers) == 4 * step, "nothing is sampled ahead"
        status = await run.until(lambda s: s["wait_trainer_secs"] > 0, "servers idle while the trainer works")
        assert status["consumed"] == 6 and status["running"] == 0

    driven(scenario, tmp_path, "rollout.max_head_offpolicyness=0")


def test_the_bound_on_staleness_is_used_and_kept(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(0)
        await run.until(lambda s: s["batches"] == 2, "two batches without any training at offpolicyness 1")
        assert await run.batch(3, wait=0.1) == {"ready": False}
        await run.serve(1)
        index = await run.batch(3)
        assert index["stats"]["staleness_max"] == 1
        samples, _ = decode_samples(await run.samples(3, range(4)))
        assert {sample.started_version for sample in samples} == {1}

    driven(scenario, tmp_path)


def test_a_slow_group_is_waited_for_not_overtaken(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        for server in run.servers:
            server.delay = 0.02
            server.length = lambda rid: 8 if rid.startswith("0-0-") else 2
        await run.serve(0)
        index = await run.batch(1)
        samples, _ = decode_samples(await run.samples(1, range(4)))
        assert [sample.group_id for sample in samples] == ["0-0", "0-0", "0-1", "0-1"]
        assert index["stats"]["response_tokens_mean"] == 5.0

    driven(scenario, tmp_path)


def test_requests_in_flight_go_on_through_an_update_with_two_spans(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        for server in run.servers:
            server.third_token_on, server.length = "v000001-r0", lambda rid: 0
        await run.serve(0)
        await asyncio.gather(*(server.first_tokens.wait() for server in run.servers))
        await run.serve(1, step=0)
        await run.batch(1)
        samples, _ = decode_samples(await run.samples(1, range(4)))
        for sample in samples:
            assert sample.versions.tolist() == [0, 0, 1, 1, 1, 1, 1, 1] and sample.finish_reason == "length"
            assert sample.restarts == sample.continuations == 0
        for server in run.servers:
            assert server.calls == [
                *("pause retract", "load /local/v000000-r0 v000000-r0", "continue"),
                *("pause retract", "load /local/v000001-r0 v000001-r0", "continue"),
            ]
        assert run.daemon.calls == ["fetch v000000-r0", "fetch v000001-r0", "release v000000-r0"], "once per node"
        served = await run.client.get("/served")
        assert served["servers"] == {"server-0": 1, "server-1": 1}
        assert [sync["version"] for sync in served["sync"]] == [0, 1]

    driven(scenario, tmp_path)


def test_nothing_serves_a_version_before_every_server_has_it(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(0)
        run.servers[1].load_delay = 0.3
        await run.publish(1)
        await run.until(lambda s: s["servers"]["server-0"]["state"] == "loading", "an update is on its way")
        assert (await run.client.get("/served"))["served"] == 0
        await run.until(lambda s: s["served"] == 1, "both serve it")
        assert run.servers[0].calls[-1] == "continue" and run.servers[0].version == run.servers[1].version

    driven(scenario, tmp_path)


def test_the_end_of_the_data_ends_the_batches(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(0)
        for step in range(1, 3):
            assert not (await run.batch(step))["end"]
            await run.serve(step)
        assert await run.batch(3) == {"ready": True, "end": True}
        assert await run.batch(2) != {"ready": True, "end": True}

    driven(scenario, tmp_path, rows=5)


def test_without_drop_last_the_tail_is_a_batch(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(5, step=0)
        assert (await run.batch(3))["stats"]["groups"] == 1
        assert (await run.batch(4))["end"]

    driven(scenario, tmp_path, "train_dataset.drop_last=false", rows=5)


def test_total_train_steps_bounds_what_is_sampled(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(5, step=0)
        assert not (await run.batch(2))["end"]
        assert (await run.batch(3))["end"]
        assert sum(len(server.requests) for server in run.servers) == 8

    driven(scenario, tmp_path, "total_train_steps=2")


def test_logged_batches_survive_the_service_and_are_given_out_again(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(0)
        await run.until(lambda s: s["batches"] == 2, "two batches are logged")
        first = contents(await run.samples(1, range(4)))
        index = await run.batch(2)
        assert await run.stop_session() == 0

        await run.start_session(attempt=1)  # the same attempt: the trainer does not publish again
        await run.until(lambda s: s["served"] == 0, "taken up from the journal")
        assert contents(await run.samples(1, range(4))) == first and await run.batch(2) == index
        await run.serve(1)
        samples, _ = decode_samples(await _samples_of(run, 3))
        assert [sample.group_id for sample in samples] == ["0-4", "0-4", "0-5", "0-5"]
        await run.stop_session()

        await run.start_session(attempt=2)  # a resume from step 1: batches 2 and 3 are replayed, then new ones come
        assert await run.batch(1, wait=0.2) == {"ready": False}, "not before the trainer says where it is"
        await run.serve(1, generation=1)
        assert (await run.batch(2))["samples"] == index["samples"]
        await run.serve(2, generation=1)
        samples, _ = decode_samples(await _samples_of(run, 4))
        assert [sample.group_id for sample in samples] == ["0-6", "0-6", "0-7", "0-7"]
        lines = read_lines(tmp_path / "rollouts" / "index.jsonl")
        assert [(line["batch"], line["group_id"]) for line in lines] == [
            *((1, "0-0"), (1, "0-1"), (2, "0-2"), (2, "0-3")),
            *((3, "0-4"), (3, "0-5"), (4, "0-6"), (4, "0-7")),
        ]

    driven(scenario, tmp_path)


async def _samples_of(run: Run, step: int) -> bytes:
    await run.batch(step)
    return await run.samples(step, range(4))


def test_retain_removes_old_batches_and_their_images(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(0)
        await run.until(lambda s: s["batches"] == 2, "two batches")
        images = tmp_path / "rollouts" / "images"
        assert sorted(path.stem for path in images.iterdir()) == [f"{i:032x}" for i in range(4)]
        await run.client.post("/retain", {"oldest_step": 2})
        assert sorted(path.stem for path in images.iterdir()) == [f"{i:032x}" for i in (2, 3)]
        assert [path.name for path in (tmp_path / "rollouts" / "batches").iterdir()] == ["000002.safetensors"]

    driven(scenario, tmp_path)


def test_an_image_is_asked_for_once_a_group(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(0)
        await run.batch(2)
        assert sorted(run.data.images_asked) == [f"{i:032x}" for i in range(4)]

    driven(scenario, tmp_path)


def test_wrong_calls_are_refused_by_name(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(0)
        await run.batch(1)
        for call, part in (
            (run.client.get("/batches/x"), "a batch has a number"),
            (run.client.get("/batches/0"), "count from 1"),
            (run.client.get_bytes("/batches/1/samples", indices="4"), "samples 0 to 3"),
            (run.client.get_bytes("/batches/9/samples", indices="0"), "not there yet"),
            (run.client.get("/evaluations/nothing"), "no evaluation nothing"),
            (run.client.post("/publish", {"version": 1}), "a publish needs"),
            (run.client.post("/evaluate", {}), "an evaluation needs"),
            (run.client.post("/retain", {}), "oldest_step"),
        ):
            with pytest.raises(RpcError, match=part):
                await call

    driven(scenario, tmp_path)


def test_a_rolling_update_pauses_at_most_its_share(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(0)
        for server in run.servers:
            server.load_delay = 0.15
        await run.publish(1)
        paused = 0
        while (status := await run.client.get("/status"))["served"] != 1:
            paused = max(paused, sum(row["state"] in ("paused", "loading") for row in status["servers"].values()))
            await asyncio.sleep(0.01)
        assert paused == 2, "half of four"
        (sync,) = [sync for sync in (await run.client.get("/served"))["sync"] if sync["version"] == 1]
        assert 0.15 <= sync["load"] < 0.3 and sync["load"] <= sync["pause"]

    driven(scenario, tmp_path, "weight_sync.mode=rolling", "weight_sync.paused_share=0.5", servers=4)


def test_only_the_newest_of_several_published_versions_is_loaded(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(0)
        run.servers[0].load_delay = 0.2
        for version in (1, 2, 3):
            await run.publish(version)
        await run.until(lambda s: s["served"] == 3, "the newest is served")
        loaded = [call.split()[2] for call in run.servers[1].calls if call.startswith("load")]
        assert loaded[0] == "v000000-r0" and loaded[-1] == "v000003-r0" and "v000002-r0" not in loaded

    driven(scenario, tmp_path)


def test_the_same_version_of_a_new_generation_is_loaded_anew(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(2, step=0)
        await run.publish(2, step=0, generation=1)
        await run.until(lambda s: run.servers[0].version == "v000002-r1", "the other weights of that name's number")
        assert (await run.client.get("/served"))["served"] == 2

    driven(scenario, tmp_path)


def test_the_last_batch_is_given_out_though_its_waiting_timed_out_as_it_came() -> None:
    """Else the trainer hears that it is the end, and the last batch is never trained."""

    async def scenario() -> None:
        unused: Any = None
        collector = Collector(
            Limits(None, 0, 1, 1), Generation(), drop_last=True,
            data=unused, pool=unused, workflow=unused, journal=unused, failures=unused,
        )  # fmt: skip
        last = Batch([], {})
        async with collector._news:
            asked = asyncio.create_task(collector.batch(1, 0.01))
            collector._batches.remember(1, last)
            collector.formed, collector.ended = 1, True
            await asyncio.wait([asked], timeout=5)
        assert await asked is last
        async with collector._news:
            assert await collector.batch(1, 0.0) is last
            assert await collector.batch(2, 0.0) is None

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_every_server_can_be_asked_for_a_fresh_answer_and_nothing_is_counted(tmp_path: Path) -> None:
    """What the parity gate compares where a batch holds nothing that the trainer's version sampled."""

    async def scenario(run: Run) -> None:
        await run.serve(0)
        await run.batch(1)
        before = await run.until(lambda status: status["running"] == 0, "all that may be started is finished")
        samples, _ = decode_samples(await run.client.get_bytes("/probe/0"))
        names = [sample.sample_id for sample in samples]
        assert names == [f"server-{i}, train-{row}" for i in (0, 1) for row in (0, 1)]
        for sample in samples:
            assert set(sample.versions.tolist()) == {0} and sample.images and sample.prompt_ids.tolist().count(5) > 1
        after = await run.client.get("/status")
        assert {key: after[key] for key in ("consumed", "ready", "batches")} == {
            key: before[key] for key in ("consumed", "ready", "batches")
        }
        with pytest.raises(RpcError) as refused:
            await run.client.get_bytes("/probe/1")
        assert refused.value.status == 503 and "not yet served by server-0, server-1" in str(refused.value)
        with pytest.raises(RpcError, match="a version is a number"):
            await run.client.get_bytes("/probe/new")

    driven(scenario, tmp_path)
