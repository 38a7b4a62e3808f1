"""Three real servers under one pool: versions brought to all of them, and more requests than they run at once."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from core.inference.client import Generation
from core.rollout.servers import OVERBOOKED, ServerState
from tests.embedded.harness import serving
from tests.servers.fleet import V1, V2, Watched, ask, fleet, request

RUNNING = 4


@pytest.fixture(scope="module")
def urls(model: Path) -> Iterator[list[str]]:
    with ExitStack() as stack:
        options = {"context_length": 512, "max_running_requests": RUNNING}
        yield [stack.enter_context(serving(model, **options)).url for _ in range(3)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("share", "at_once"), [(None, 3), (0.34, 1), (0.7, 2)], ids=["together", "third", "two thirds"]
)
def test_an_update_pauses_no_more_servers_than_it_may(
    urls: list[str], versions: dict[str, Path], share: float | None, at_once: int
) -> None:
    """With requests in flight on each, which all end with both versions, the old one first."""

    async def scenario() -> None:
        async with fleet(urls, versions, share=share) as made:
            servers = made.pool.in_rotation()
            partials = [Generation() for _ in servers]
            flights = [
                asyncio.create_task(server.generate(request(i, 300), stream=True, partial=partials[i]))
                for i, server in enumerate(servers)
            ]
            await made.until(lambda: all(len(partial.output_ids) > 3 for partial in partials))
            made.publish(V2, 2)
            await made.until(lambda: len(made.on(V2)) == 3)
            assert Watched.most == at_once
            for server in servers:
                assert (await server.client.model_info())["weight_version"] == V2
            for flight in flights:
                answer = await flight
                assert set(answer.versions) == {1, 2} and answer.versions == sorted(answer.versions)
                assert len(answer.output_ids) == 300
            assert made.restarted == [] and made.pool.losses == 0

    asyncio.run(asyncio.wait_for(scenario(), 200))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("share", [None, 0.34], ids=["together", "rolling"])
def test_a_server_that_cannot_load_keeps_the_old_version_and_is_taken_out_by_name(
    urls: list[str], versions: dict[str, Path], share: float | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    torn = Path(shutil.copytree(versions[V2], tmp_path / "torn"))
    next(iter(sorted(torn.glob("*.safetensors")))).unlink()

    async def scenario() -> None:
        async with fleet(urls, versions, share=share) as made:
            made.directories["node-1", V2] = torn
            bad = made.pool.servers["server-1"]
            made.publish(V2, 2)
            await made.until(lambda: made.on(V2) == ["server-0", "server-2"] and bad.state is ServerState.OUT)
            assert (await bad.client.model_info())["weight_version"] == V1
            assert made.pool.served() == 2 and made.restarted == ["server-1"]
            assert await made.pool.acquire("server-1") is not bad
            await bad.client.resume()

    asyncio.run(asyncio.wait_for(scenario(), 200))
    said = capfd.readouterr().err
    assert "server server-1 (" in said and "is out" in said and "torn" in said


@pytest.mark.timeout(240)
def test_256_long_requests_wait_outside_and_restart_nobody(urls: list[str], versions: dict[str, Path]) -> None:
    """No server is given more than it can soon run, and none is taken for stuck while it works through them."""

    async def scenario() -> None:
        async with fleet(urls[:1], versions) as made:
            assert made.pool.most_requests() == OVERBOOKED * RUNNING
            answers = await asyncio.gather(*(ask(made.pool, number, 100) for number in range(256)))
            assert all(len(answer.output_ids) == 100 for answer in answers)
            assert Watched.busiest == OVERBOOKED * RUNNING
            assert made.restarted == [] and made.pool.losses == 0
            assert made.pool.servers["server-0"].served_name == V1

    asyncio.run(asyncio.wait_for(scenario(), 200))
