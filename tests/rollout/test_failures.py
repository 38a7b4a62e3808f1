"""What goes wrong around the rollout service, and what it does: servers, weights, rows, ids, the budget of failures."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from core.rl.trajectory import Sample, decode_samples
from core.rpc.errors import RpcError
from core.telemetry.files import read_lines
from tests.rollout.stub_run import Run
from tests.rollout.stub_server import STOP, token_at
from tests.rollout.test_service import driven

LONG = "gconfig.max_new_tokens=40"


def unbroken(run: Run, sample: Sample) -> list[int]:
    """What one server alone would have answered, from the seed that was sent."""
    asked = [request for server in run.servers for request in server.requests]
    seeds = {r["rid"].rsplit("-", 3)[0]: r["sampling_params"].get("sampling_seed") for r in asked}
    start = len(run.data.prompt("train", 0, int(sample.group_id.split("-")[1]))["expanded_ids"])
    count = len(sample.sampled_ids) - (sample.finish_reason == "stop")
    tokens = [token_at(seeds[sample.sample_id], start + i) for i in range(count)]
    return [*tokens, STOP] if sample.finish_reason == "stop" else tokens


async def all_samples(run: Run, step: int) -> list[Sample]:
    index = await run.batch(step)
    samples, _ = decode_samples(await run.samples(step, range(len(index["samples"]))))
    return samples


def test_answers_of_a_dead_server_go_on_elsewhere_from_the_tokens_that_arrived(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        for server in run.servers:
            server.length, server.delay = lambda rid: 30, 0.005
        run.servers[0].third_token_on = "never"
        await run.serve(0)
        await run.servers[0].first_tokens.wait()
        await run.until(lambda s: s["servers"]["server-0"]["running"] == 4, "two groups on it")
        await asyncio.sleep(0.05)  # the second token is on its way
        await run.servers[0].die()
        run.daemon.down.add("server-0")
        samples = await all_samples(run, 1) + await all_samples(run, 2)
        assert len(samples) == 8
        for sample in samples:
            assert sample.sampled_ids.tolist() == unbroken(run, sample) and len(sample.sampled_ids) == 30
        assert sum(sample.continuations for sample in samples) == 4
        again = [r for r in run.servers[1].requests if sum(token >= 100 for token in r["input_ids"]) == 2]
        assert len(again) == 4 and all(r["sampling_params"]["max_new_tokens"] == 38 for r in again)
        status = await run.client.get("/status")
        assert status["continuations"] == 4 and status["void"] == {} and status["server_losses"] == 1
        assert status["servers"]["server-0"]["state"] == "out"

    driven(scenario, tmp_path, LONG)


def test_short_answers_of_a_dead_server_start_again_from_their_prompt(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        run.servers[0].third_token_on = "never"
        await run.serve(0)
        await run.until(lambda s: s["servers"]["server-0"]["running"] == 4, "two groups on it")
        await run.servers[0].die()
        run.daemon.down.add("server-0")
        samples = await all_samples(run, 1) + await all_samples(run, 2)
        assert all(sample.sampled_ids.tolist() == unbroken(run, sample) for sample in samples)
        assert sorted(sample.restarts for sample in samples) == [0, 0, 0, 0, 1, 1, 1, 1]
        assert not any(request["stream"] for server in run.servers for request in server.requests)

    driven(scenario, tmp_path)


def test_the_only_server_dies_and_comes_back_on_the_current_version(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        (server,) = run.servers
        server.third_token_on = "never"
        await run.serve(3, step=0)
        await run.until(lambda s: s["running"] == 10, "groups are waited for")
        await server.die()
        await run.until(lambda s: s["servers"]["server-0"]["state"] == "out", "its loss is seen")
        server.third_token_on, server.version = None, "0"
        await server.start()
        samples = await all_samples(run, 1)
        assert all(set(sample.versions.tolist()) == {3} for sample in samples), "loaded before it was asked anything"
        assert all(sample.sampled_ids.tolist() == unbroken(run, sample) for sample in samples)

    driven(scenario, tmp_path, servers=1)


def test_a_server_that_is_silent_while_requests_wait_is_restarted(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        run.servers[0].stuck = True
        await run.serve(0)
        samples = await all_samples(run, 1) + await all_samples(run, 2)
        assert all(sample.sampled_ids.tolist() == unbroken(run, sample) for sample in samples)
        status = await run.client.get("/status")
        assert "no token for 0.6 s" in status["servers"]["server-0"]["reason"]
        assert "restart server-0" in run.daemon.calls

    driven(scenario, tmp_path, "rollout.server_deadline=0.6")


def test_a_slow_server_with_a_long_queue_is_not_restarted(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        (server,) = run.servers
        server.delay, server.length = 0.1, lambda rid: 0
        await run.serve(0)
        assert len(await all_samples(run, 1)) == 4
        status = await run.client.get("/status")
        assert status["server_losses"] == 0, "each of its answers took longer than the deadline, its tokens did not"

    driven(scenario, tmp_path, "rollout.server_deadline=0.6", "gconfig.max_new_tokens=18", servers=1)


def test_a_server_that_fails_a_load_is_taken_out_and_named(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(0)
        await run.batch(1)
        run.servers[1].fail_loads = 1
        await run.serve(1)
        status = await run.client.get("/status")
        assert status["servers"]["server-1"]["state"] == "out"
        assert "shapes differ" in status["servers"]["server-1"]["reason"]
        assert (await run.client.get("/served"))["servers"] == {"server-0": 1, "server-1": None}
        assert "restart server-1" in run.daemon.calls
        assert (await run.batch(2))["ready"], "the other one goes on"
        run.servers[1].started += 1  # its daemon has started it again
        await run.until(lambda s: s["servers"]["server-1"]["version"] == 1, "it is back, on the current version")

    driven(scenario, tmp_path)


def test_a_server_that_says_another_version_than_loaded_is_taken_out(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        run.servers[1].lie_about_version = True
        await run.serve(7, step=0)
        status = await run.client.get("/status")
        assert "loaded v000007-r0 but answers with version 0" in status["servers"]["server-1"]["reason"]

    driven(scenario, tmp_path)


def test_a_server_that_dies_half_loaded_is_loaded_anew_before_it_is_asked(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(0)
        server = run.servers[1]
        server.load_delay = 60
        await run.publish(1)
        await run.until(lambda s: s["servers"]["server-1"]["state"] == "loading", "it is in the middle of it")
        await server.die()
        await run.until(lambda s: s["servers"]["server-1"]["state"] == "out", "its loss is seen")
        server.load_delay, server.version = 0, "half of it"
        asked = len(server.requests)
        await server.start()
        await run.until(lambda s: s["servers"]["server-1"]["version"] == 1, "it is back, on the current version")
        assert server.version == "v000001-r0" and len(server.requests) == asked
        await run.until(lambda s: s["served"] == 1, "and so is the other one")

    driven(scenario, tmp_path)


def test_a_server_that_lives_and_cannot_be_reached_is_restarted(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        run.servers[0].third_token_on = "never"
        await run.serve(0)
        await run.until(lambda s: s["servers"]["server-0"]["running"] == 4, "two groups on it")
        await run.servers[0].die()  # its daemon goes on to say that it is up
        assert len(await all_samples(run, 1) + await all_samples(run, 2)) == 8
        while "restart server-0" not in run.daemon.calls:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert run.daemon.calls.count("restart server-0") == 1
        run.servers[0].third_token_on = None
        await run.servers[0].start()
        await run.until(lambda s: s["servers"]["server-0"]["state"] == "serving", "started anew, it is back")

    driven(scenario, tmp_path, "rollout.server_deadline=0.6")


def test_a_server_out_of_memory_is_restarted_and_costs_no_group(tmp_path: Path) -> None:
    """It answers, and at once: with the shortest queue it would be given everything."""

    async def scenario(run: Run) -> None:
        run.servers[0].out_of_memory = True
        await run.serve(0)
        samples = await all_samples(run, 1) + await all_samples(run, 2)
        assert all(sample.sampled_ids.tolist() == unbroken(run, sample) for sample in samples)
        status = await run.client.get("/status")
        assert "refused 8 requests in a row" in status["servers"]["server-0"]["reason"]
        assert "out of memory" in status["servers"]["server-0"]["reason"]
        assert "restart server-0" in run.daemon.calls and status["void"] == {}

    driven(scenario, tmp_path)


def test_a_version_that_no_node_can_fetch_is_kept_from_the_servers_and_in_the_end_stops_the_run(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(0)
        run.daemon.refuse_fetch = 2
        await run.serve(1)  # refused twice, then there
        assert [call for call in run.daemon.calls if call.startswith("fetch")].count("fetch v000001-r0") == 3
        assert (await run.client.get("/status"))["server_losses"] == 0
        run.daemon.refuse_fetch = 100
        await run.publish(2)
        status = await run.until(lambda s: s["fatal"], "the budget of failures is used up")
        assert "bit flip" in status["fatal"]["traceback"]
        assert {server.version for server in run.servers} == {"v000001-r0"}
        assert await run.exit == 1

    driven(scenario, tmp_path, "rollout.max_consecutive_failures=3")


def test_a_bad_row_is_void_and_the_next_one_moves_up(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(0)
        index = await run.batch(1)
        samples, _ = decode_samples(await run.samples(1, range(4)))
        assert [sample.group_id for sample in samples] == ["0-0", "0-0", "0-2", "0-2"]
        assert index["stats"]["void"] == {"bad row": 1}
        (line,) = [line for line in read_lines(tmp_path / "void.jsonl") if line["position"] == 1]
        assert line["reason"] == "bad row" and "rows.parquet:1: column answer is empty" in line["message"]

    driven(scenario, tmp_path, bad=[1])


def test_bad_rows_one_after_the_other_stop_the_run_with_the_first(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.publish(0)
        status = await run.until(lambda s: s["fatal"], "four rows in a row")
        assert status["fatal"]["message"].startswith("4 groups in a row void: bad row")
        assert "rows.parquet:0: column answer is empty" in status["fatal"]["traceback"], "the first of them"
        assert await run.exit == 1
        assert [line["position"] for line in read_lines(tmp_path / "void.jsonl")] == [0, 1, 2, 3]

    driven(scenario, tmp_path, "rollout.max_consecutive_failures=4", bad=range(12))


def test_a_group_whose_prompt_ids_differ_is_void_and_many_in_a_row_stop_the_run(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        for server in run.servers:
            server.spoil = lambda ids: [*ids[:3], 5, *ids[3:]]
        await run.serve(0)
        status = await run.until(lambda s: s["fatal"], "four groups in a row")
        assert status["fatal"]["message"].startswith("4 groups in a row void: prompt ids differ")
        assert "0-0-" in status["fatal"]["traceback"] or "0-1-" in status["fatal"]["traceback"], "the first ones"
        with pytest.raises(RpcError, match="prompt ids differ"):
            await run.batch(1)
        assert await run.exit == 1
        voids = read_lines(tmp_path / "void.jsonl")
        assert {line["reason"] for line in voids} == {"prompt ids differ"}
        assert 4 <= len(voids) <= 8, "what was in flight, and nothing new"

    driven(scenario, tmp_path, "rollout.max_consecutive_failures=4")


def test_one_group_whose_prompt_ids_differ_costs_only_itself(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        for server in run.servers:
            server.spoil = lambda ids: ids[:-1] if 13 in ids else ids  # row 0 alone
        await run.serve(0)
        samples = await all_samples(run, 1)
        assert [sample.group_id for sample in samples] == ["0-1", "0-1", "0-2", "0-2"]
        assert (await run.client.get("/status"))["void"] == {"prompt ids differ": 1}

    driven(scenario, tmp_path, "rollout.max_consecutive_failures=4")


REWARDS = """
import os, time
def raising(prompt, completion, prompt_ids, completion_ids, **row):
    raise KeyError("no such column")
def hanging_once(prompt, completion, prompt_ids, completion_ids, **row):
    if prompt == "row 0":
        while True: time.sleep(1)
    return 1
def a_string(prompt, completion, prompt_ids, completion_ids, **row):
    return "1.0" if prompt == "row 0" else 0.25
"""


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [("hanging_once", "timeout", [0, 0, 1, 1]), ("a_string", "not_a_number", [0, 0, 0.25, 0.25])],
)
def test_a_failed_reward_scores_zero_and_is_counted(tmp_path: Path, name: str, kind: str, expected: list) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARDS)

    async def scenario(run: Run) -> None:
        await run.serve(0)
        samples = await all_samples(run, 1)
        assert [sample.reward for sample in samples] == expected
        assert (await run.batch(1))["stats"]["reward_errors"] == {kind: 2}
        assert samples[0].reward_error is not None and samples[0].reward_error.startswith(kind)

    driven(scenario, tmp_path, f"reward=my_rewards:{name}", "rollout.reward_timeout=0.5")


def test_a_group_that_waits_for_its_rewards_takes_no_room_on_the_servers(tmp_path: Path) -> None:
    """One group at a time fits the server; the first one's rewards hang; the five behind it are sampled meanwhile."""
    (tmp_path / "my_rewards.py").write_text(REWARDS)

    async def scenario(run: Run) -> None:
        stub = run.servers[0]
        stub.capacity, stub.delay = 1, 0.01
        await run.serve(0)
        await run.until(lambda status: status["ready"] == 5 and status["running"] == 1, "all but the first are ready")
        assert stub.most_active == 2, "twice what it runs at once"
        assert (await run.client.get("/status"))["servers"]["server-0"]["capacity"] == 1

    more = ["rollout.reward_timeout=60", "rollout.max_head_offpolicyness=2", "rollout.reward_workers=3"]
    driven(scenario, tmp_path, "reward=my_rewards:hanging_once", *more, servers=1)


def test_rewards_that_always_raise_stop_the_run_with_the_first_traceback(tmp_path: Path) -> None:
    (tmp_path / "my_rewards.py").write_text(REWARDS)

    async def scenario(run: Run) -> None:
        await run.serve(0)
        status = await run.until(lambda s: s["fatal"], "three groups in a row")
        assert "KeyError: 'no such column'" in status["fatal"]["traceback"]
        assert "my_rewards.py" in status["fatal"]["traceback"]
        assert await run.exit == 1

    driven(scenario, tmp_path, "reward=my_rewards:raising", "rollout.max_consecutive_failures=3")


def test_a_reward_that_is_not_there_stops_the_run_before_anything_is_sampled(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        status = await run.until(lambda s: s["fatal"], "it is looked for at the start")
        assert "nowhere:f cannot be loaded" in status["fatal"]["message"]
        assert str(tmp_path) in status["fatal"]["message"]
        assert await run.exit == 1

    driven(scenario, tmp_path, "reward=nowhere:f")


def test_no_server_at_all_stops_the_run_after_its_deadline(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.publish(0)
        status = await run.until(lambda s: s["fatal"], "there is nothing to wait for")
        assert "none is registered" in status["fatal"]["message"]

    driven(scenario, tmp_path, "rollout.server_deadline=1", "rollout.setup_timeout=1", servers=0)


def test_a_flapping_server_is_left_out_and_named(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        run.servers[1].fail_loads = 100
        await run.publish(0)
        for _ in range(6):
            await run.until(lambda s: s["servers"].get("server-1", {}).get("state") == "out", "its load failed again")
            calls = len(run.servers[1].calls)
            run.servers[1].started += 1  # its daemon starts it again
            if "server-1" in (await run.client.get("/status"))["left_out"]:
                break
            while len(run.servers[1].calls) == calls:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        status = await run.client.get("/status")
        assert "left out: out 6 times in a row" in status["servers"]["server-1"]["reason"]
        assert "shapes differ" in status["left_out"]["server-1"]
        assert (await run.batch(1))["ready"], "the other one works"

    driven(scenario, tmp_path)
