"""What the parts of a server over several nodes say to their daemon, and what a head says of parts that never came."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from core.inference.process import NotReadyError, ServerProcess
from launcher.planning.layout import Server
from launcher.roles import inference_server, server_parts
from launcher.roles.arguments import RoleArguments
from launcher.roles.server_parts import Notices, follow
from tests.servers.test_commands import seat


class Daemon:
    """Answers as a daemon of the node would; keeps what it is told."""

    def __init__(self, *parts: dict[str, Any]) -> None:
        self.told: list[tuple[str, str]] = []
        self.registry = {"parts": list(parts), "meetings": {"server-0": {"start": "s7", "host": "10.0.0.1", "port": 7}}}

    async def get(self, path: str) -> dict[str, Any]:
        return self.registry

    async def post(self, path: str, body: dict[str, Any], *, request_id: str) -> None:
        self.told.append((body["start"], body["state"]))

    async def close(self) -> None: ...


def part(number: int, start: str, state: str, why: str = "") -> dict[str, Any]:
    name = f"server-0-part-{number}"
    return {"name": name, "server": "server-0", "part": number, "start": start, "state": state, "why": why}


def notices(daemon: Daemon, number: int) -> Notices:
    made = Notices("http://127.0.0.1:9", "t", Server("server-0", [0], number, 4))
    made._client = cast("Any", daemon)
    return made


def test_a_head_that_waits_in_vain_names_the_parts_that_are_missing(capsys: pytest.CaptureFixture[str]) -> None:
    rows = part(1, "s7", "up"), part(2, "", "starting"), part(3, "s6", "down", "its process ended with status 1")

    class Vain:
        process = None

        async def start(self) -> str:
            raise NotReadyError("not ready within 300 s (rollout.setup_timeout)\nwhat it said")

        async def stop(self) -> None: ...

    async def scenario() -> int:
        head = notices(Daemon(*rows), 0)
        head.start = "s7"
        return await inference_server._serve(
            cast("ServerProcess", Vain()), cast("RoleArguments", None), asyncio.Event(), head
        )

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) == 1
    assert capsys.readouterr().err == (
        "NotReadyError: not ready within 300 s (rollout.setup_timeout); server-0-part-2 is not with it (starting); "
        "server-0-part-3 is not with it (its process ended with status 1)\nwhat it said\n"
    )


@pytest.mark.parametrize(("state", "told"), [("up", [("s7", "down")]), ("down", [])])
def test_a_part_whose_last_process_was_said_to_run_says_that_it_does_not(
    tmp_path: Path, state: str, told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_parts.guard, "become_subreaper", lambda: None)  # this process stays what it is
    daemon = Daemon(part(1, "s7", state))

    async def scenario() -> int:
        stop = asyncio.get_running_loop().create_future()
        stop.set_result(None)
        words = {"log": tmp_path / "log", "patience": 9.0, "stop": stop}
        return await follow(notices(daemon, 1), "server-0-part-1", seat(), cast("Any", None), **cast("Any", words))

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) == 0
    assert daemon.told == told, "nobody joins the same start twice, so the head has to hear of its end"
