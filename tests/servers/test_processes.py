"""Around the servers: ports that are held, a proxy that breaks off with its server, versions that are not told."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from core.config.rollout import Rollout
from core.inference.belongings import ServerDirectory, segments
from core.inference.client import Generation, Images, Request, ServerLostError, ServerRefusedError
from core.inference.ports import BLOCK, FIRST, take_block
from core.inference.proxy import Proxy, RefusedError
from core.inference.vllm import GENERATE, VLLMClient
from launcher.roles.training.disagreement import verdict
from launcher.roles.training.parity import Gate, Parity, ParityError, summary
from launcher.servers.recipes import RECIPES
from tests.support.runs import ROOT, environment

TOKEN = "secret"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def test_two_holders_never_have_a_port_in_common() -> None:
    blocks = [take_block() for _ in range(8)]
    try:
        ports = [port for block in blocks for port in range(block.first, block.first + BLOCK)]
        assert len(set(ports)) == len(ports) and min(ports) >= FIRST
        low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        assert max(ports) < low, "a port that is handed to clients may be taken at any time"
    finally:
        for block in blocks:
            block.close()


def test_a_block_with_a_taken_port_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    block = take_block()
    block.close()
    monkeypatch.setattr("core.inference.ports.FIRST", block.first)
    monkeypatch.setattr("core.inference.ports.LAST", block.first + 3 * BLOCK)
    with socket.socket() as other:
        other.bind(("127.0.0.1", block.first + 5))
        found = take_block()
        found.close()
        assert found.first != block.first


def test_a_directory_goes_with_its_server_or_with_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = "import core.inference.belongings as its; print(its.ServerDirectory().path, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env={**environment(), "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        (theirs / "http.sock").touch()
        own = ServerDirectory()
        assert theirs.parent == own.path.parent == tmp_path and theirs.exists(), "its holder lives"
        own.remove()
        other.kill()
    assert theirs.exists(), "nobody was left to remove it"
    again = ServerDirectory()
    assert sorted(tmp_path.iterdir()) == [again.path]
    again.remove()


def test_only_what_the_server_maps_loses_its_name() -> None:
    names = [f"/dev/shm/sglang_loads_{os.getpid()}_{number}.shm" for number in (1, 2)]
    program = (
        "import mmap, sys; f = open(sys.argv[1], 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096); print()"
    )
    servers = []
    try:
        for name in names:
            shell = f"{shlex.quote(sys.executable)} -c {shlex.quote(program + '; sys.stdin.read()')} {name}; true"
            servers.append(subprocess.Popen(["sh", "-c", shell], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            assert servers[-1].stdout.readline() == b"\n"
        assert segments(servers[0].pid) == {names[0]}
        assert [Path(name).exists() for name in names] == [False, True] and servers[0].poll() is None
        assert segments(servers[0].pid) == set()
    finally:
        for server in servers:
            server.communicate()
        Path(names[1]).unlink(missing_ok=True)


@asynccontextmanager
async def serving(routes: dict[tuple[str, str], Handler]) -> AsyncIterator[str]:
    app = web.Application()
    for (method, path), handler in routes.items():
        app.router.add_route(method, path, handler)
    runner = web.AppRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_the_proxy_passes_on_what_is_listed_and_checked_and_nothing_else() -> None:
    async def scenario() -> None:
        seen: list[tuple[str, str]] = []

        async def answer(request: web.Request) -> web.Response:
            seen.append((request.path, request.headers.get("Authorization", "")))
            return web.json_response({"body": (await request.read()).decode()})

        def only_small(body: dict[str, Any]) -> None:
            if body.get("size", 0) > 3:
                raise RefusedError("too large")

        async with serving({("POST", "/{any}"): answer}) as url:
            proxy = Proxy(url, TOKEN, {("POST", "/open"): None, ("POST", "/checked"): only_small}, deadline=20)
            front = await proxy.start()
            async with aiohttp.ClientSession() as session:

                async def status(path: str, body: Any, token: str = TOKEN) -> int:
                    headers = {"Authorization": f"Bearer {token}"}
                    async with session.post(front + path, data=json.dumps(body), headers=headers) as reply:
                        return reply.status

                assert await status("/open", {}) == 200
                assert await status("/open", {}, "other") == 401
                assert await status("/closed", {}) == 403
                assert await status("/open/../closed", {}) == 403
                assert await status("//open", {}) == 403
                assert await status("/checked", {"size": 3}) == 200
                assert await status("/checked", {"size": 4}) == 400
                assert await status("/checked", [1]) == 400
            await proxy.stop()
            assert [path for path, _ in seen] == ["/open", "/checked"]
            assert not any(TOKEN in header for _, header in seen), "the run's token goes no further than the proxy"

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one() -> None:
    async def scenario() -> None:
        async def half(request: web.Request) -> web.StreamResponse:
            reply = web.StreamResponse()
            await reply.prepare(request)
            chunk = {"choices": [{"token_ids": [5], "logprobs": {"content": [{"logprob": -1.0}]}}]}
            await reply.write(f"data: {json.dumps({**chunk, 'prompt_token_ids': [1]})}\n\n".encode())
            assert request.transport is not None
            request.transport.abort()
            return reply

        async with serving({("POST", GENERATE): half, **told(versions=True)}) as url:
            routes = {("POST", GENERATE): None, ("GET", "/openapi.json"): None, ("GET", "/v1/models"): None}
            proxy = Proxy(url, TOKEN, routes, deadline=20)
            client = VLLMClient(await proxy.start(), TOKEN)
            partial = Generation()
            with pytest.raises(ServerLostError):
                await client.generate_ids(request(), stream=True, partial=partial)
            assert partial.output_ids == [5] and not partial.finish_reason
            await client.close()
            await proxy.stop()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def request(*images: bytes) -> Request:
    return Request("r", [1], Images(images), {"max_new_tokens": 4})


def told(
    *, versions: bool, generate: bool = True, fields: dict[str, Any] | None = None
) -> dict[tuple[str, str], Handler]:
    """The routes by which a server says what it can do; `fields` of the body of a request."""
    paths = [GENERATE] if generate else []
    paths += ["/weight_info", "/update_weight_version"] if versions else []

    async def openapi(http: web.Request) -> web.Response:
        schemas = {"GenerateRequest": {"properties": fields or {}}}
        return web.json_response({"paths": {path: {} for path in paths}, "components": {"schemas": schemas}})

    async def models(http: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "policy-1", "root": "/m", "max_model_len": 64}]})

    return {("GET", "/openapi.json"): openapi, ("GET", "/v1/models"): models}


def test_a_server_without_the_route_is_told_how_to_be_started() -> None:
    async def scenario() -> None:
        async with serving(told(versions=True, generate=False)) as url:
            client = VLLMClient(url)
            with pytest.raises(ServerRefusedError, match="--enable-scale-out"):
                await client.generate_ids(request(), stream=False)
            await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.parametrize("takes", [True, False])
def test_a_server_that_would_drop_the_images_is_not_asked(takes: bool) -> None:
    """vLLM 0.26 has the route, and no content_parts in it: what its parser does not know is left out in silence."""

    async def scenario() -> None:
        asked = []

        async def generate(http: web.Request) -> web.Response:
            asked.append(await http.json())
            return web.json_response(
                {"prompt_token_ids": [1], "choices": [{"token_ids": [7], "finish_reason": "stop"}]}
            )

        fields = {"token_ids": {}, **({"content_parts": {}} if takes else {"features": {}})}
        async with serving({**told(versions=True, fields=fields), ("POST", GENERATE): generate}) as url:
            client = VLLMClient(url)
            await client.generate_ids(request(), stream=False)
            if takes:
                await client.generate_ids(request(b"png"), stream=False)
                assert asked[1]["content_parts"]
            else:
                with pytest.raises(ServerRefusedError, match="takes no images"):
                    await client.generate_ids(request(b"png"), stream=False)
            assert len(asked) == 1 + takes
            await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.parametrize("ending", ["abort", "length"])
def test_where_versions_are_not_told_no_answer_has_two(ending: str) -> None:
    """Abort, load, send again. What may have been queued through the load is not used."""

    async def scenario() -> None:
        release, calls = asyncio.Event(), []

        async def generate(http: web.Request) -> web.Response:
            await release.wait()
            content = [{"token_id": 7, "logprob": -0.5}]
            choice = {"token_ids": [7], "logprobs": {"content": content}, "finish_reason": ending}
            return web.json_response({"prompt_token_ids": [1], "choices": [choice]})

        async def note(http: web.Request) -> web.Response:
            calls.append(http.path_qs)
            return web.json_response({})

        routes = {("POST", path): note for path in ("/pause", "/collective_rpc", "/resume")}
        async with serving({**told(versions=False), **routes, ("POST", GENERATE): generate}) as url:
            client = VLLMClient(url)
            await client.load("/w", "v000003-r0")
            flight = asyncio.create_task(client.generate_ids(request(), stream=False))
            await asyncio.sleep(0.2)
            await client.pause()
            await client.load("/w", "v000004-r0")
            await client.resume()
            release.set()
            if ending == "abort":
                answer = await flight
                assert answer.versions == [3] and not answer.finished
            else:
                with pytest.raises(ServerLostError, match="does not tell versions"):
                    await flight
            fresh = await client.generate_ids(request(), stream=False)
            assert fresh.versions == [4]
            assert (await client.model_info())["weight_version"] == "v000004-r0"
            assert calls == ["/collective_rpc", "/pause?mode=abort", "/collective_rpc", "/resume"]
            await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_the_gate_names_what_to_look_at() -> None:
    fine = summary([("0-0-0", True, 10, 0.1, 0.05), ("0-0-1", False, 10, 0.1, 0.04)])
    assert fine is not None and (fine.tokens, round(fine.mean, 6), fine.most) == (20, 0.01, 0.05)
    blind = summary([("0-0-0", True, 10, 9.0, 2.0), ("0-1-0", False, 10, 0.1, 0.04)])
    assert blind is not None and blind.worst == "0-0-0"
    assert "without an image agree" in verdict(0.45, {"hot": 0.4}, 0.05, blind.bare_mean)
    assert "other weights" in verdict(2.0, {"hot": 1.9, "bans": 1.5}, 0.05, None)
    assert verdict(2.0, {"hot": 0.03, "bans": 1.5}, 0.05, None).startswith("Cause: hot")
    assert summary([]) is None


def test_the_gate_waits_for_a_verdict_and_is_due_again(tmp_path: Path) -> None:
    gate = Gate(Rollout(parity_check_steps=4))
    good = Parity(20, 0.01, 0.05, "0-0-0", None, 0.2)
    assert gate.is_due(1) and gate.is_due(2), "no token of the trainer's version yet"
    assert gate.passed(good) and not gate.is_due(3) and gate.is_due(4)
    assert not gate.passed(replace(good, mean=0.06)) and not gate.passed(replace(good, most=3.1))
    assert not gate.passed(replace(good, image_effect=0.0)), "the trainer does not see its images"
    with pytest.raises(ParityError, match=r"rollout\.parity=warn"):
        gate.refuse("no")
    assert Gate(Rollout(parity="warn")).refuse("no") == "no"
    assert not Gate(Rollout(parity="off", parity_check_steps=1)).is_due(1)


def test_a_changed_recipe_is_another_environment() -> None:
    keys = [recipe.key for recipe in RECIPES.values()]
    assert len(set(keys)) == len(keys)
    recipe = RECIPES["vllm", "cpu"]
    assert type(recipe)(**{**vars_of(recipe), "torch": "torch==0"}).key != recipe.key
    assert type(recipe)(**vars_of(recipe)).key == recipe.key


def vars_of(recipe: Any) -> dict[str, Any]:
    return {name: getattr(recipe, name) for name in type(recipe).__dataclass_fields__}
