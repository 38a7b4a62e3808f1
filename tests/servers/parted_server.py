"""Stands in for an SGLang server over several nodes: its command line behind this file, its parts really meet.

Part 0 serves once every other part has connected to it, and answers that it has loaded a version only if all parts read
the same manifest at that path. A part that loses another hangs, as collectives do: nothing here ends by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

CONNECT_SECS = 120


def content(path: str) -> str:
    try:
        return hashlib.sha256((Path(path) / "manifest.json").read_bytes()).hexdigest()
    except OSError as error:
        return f"unreadable: {error}"


class Head:
    def __init__(self, name: str, others: int) -> None:
        self.name = name
        self.others = others
        self.version = "default"
        self.parts: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self.complete = asyncio.Event()

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (await reader.readline()).decode().strip() != self.name:
            writer.close()  # of another start
            return
        self.parts.append((reader, writer))
        if len(self.parts) == self.others:
            self.complete.set()

    async def load(self, http: web.Request) -> web.Response:
        body = await http.json()
        path = body["model_path"]
        read = {content(path)}
        for reader, writer in self.parts:
            writer.write(path.encode() + b"\n")
            read.add((await reader.readline()).decode().strip())
        good = len(read) == 1 and not next(iter(read)).startswith("unreadable")
        self.version = body["weight_version"] if good else self.version
        return web.json_response({"success": good, "message": f"parts read {sorted(read)} at {path}"})

    async def generate(self, http: web.Request) -> web.Response:
        count = (await http.json())["sampling_params"]["max_new_tokens"]
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}, "weight_version": self.version}
        meta["output_token_logprobs"] = [[-1.0, 7, None]] * count
        return web.json_response({"output_ids": [7] * count, "prompt_token_ids": [0], "meta_info": meta})

    async def models(self, http: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.name}]})

    async def info(self, http: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def nothing(self, http: web.Request) -> web.Response:
        return web.json_response({})

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/v1/models", self.models), web.get("/model_info", self.info)])
        app.add_routes([web.post("/generate", self.generate), web.post("/update_weights_from_disk", self.load)])
        app.add_routes([web.post(path, self.nothing) for path in ("/pause_generation", "/continue_generation")])
        app.add_routes([web.get("/server_info", self.nothing)])
        return app


async def head(words: argparse.Namespace, host: str, port: int) -> None:
    server = Head(words.served_model_name, words.nnodes - 1)
    await asyncio.start_server(server.meet, host, port)
    await server.complete.wait()
    runner = web.AppRunner(server.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, words.host, words.port).start()
    await asyncio.Event().wait()


async def part(words: argparse.Namespace, host: str, port: int) -> None:
    async with asyncio.timeout(CONNECT_SECS):
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, port)
                break
            except OSError:
                await asyncio.sleep(0.05)
    writer.write(words.served_model_name.encode() + b"\n")
    while path := await reader.readline():
        writer.write(content(path.decode().strip()).encode() + b"\n")
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("--model-path", "--served-model-name", "--host", "--dist-init-addr"):
        parser.add_argument(flag, required=True)
    for flag in ("--port", "--nnodes", "--node-rank"):
        parser.add_argument(flag, required=True, type=int)
    words, _ = parser.parse_known_args()
    # as workers that outlive a killed server do, in a session of their own
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", words.model_path], start_new_session=True)
    host, _, port = words.dist_init_addr.rpartition(":")
    asyncio.run((part if words.node_rank else head)(words, host, int(port)))


if __name__ == "__main__":
    sys.exit(main())
