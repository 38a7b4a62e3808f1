"""A server that has no lock of its own: what another user of the machine reaches of it, and of the proxy before it."""

from __future__ import annotations

import asyncio
import http.client
import os
import socket

from aiohttp import web

from core.inference.belongings import ServerDirectory
from core.inference.proxy import Proxy
from tests.support.other_user import as_nobody

TOKEN = "the-runs-token"


def test_another_user_reaches_neither_the_socket_nor_what_is_behind_the_proxy() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response({})

    async def scenario() -> None:
        directory = ServerDirectory()
        place = str(directory.path / "http.sock")
        app = web.Application()
        app.router.add_post("/generate", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, place).start()
        proxy = Proxy("http://server", TOKEN, {("POST", "/generate"): None}, deadline=20, unix_socket=place)
        port = int((await proxy.start()).rpartition(":")[2])

        def through_the_proxy(token: str) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            connection.request("POST", "/generate", body=b"{}", headers={"Authorization": f"Bearer {token}"})
            return connection.getresponse().status

        def to_the_socket() -> str:
            with socket.socket(socket.AF_UNIX) as client:
                try:
                    client.connect(place)
                except PermissionError:
                    return "refused"
            return "connected"

        assert await asyncio.to_thread(through_the_proxy, TOKEN) == 200
        assert await asyncio.to_thread(as_nobody, lambda: through_the_proxy("0" * 64)) == 401
        assert directory.path.stat().st_mode & 0o077 == 0
        if os.geteuid() == 0:  # of the same user only the directory's mode can be seen
            assert await asyncio.to_thread(as_nobody, to_the_socket) == "refused"
        await proxy.stop()
        await runner.cleanup()
        directory.remove()

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert asked == ["/generate"]
