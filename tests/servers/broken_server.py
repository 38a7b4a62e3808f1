"""A server that makes one mistake: `broken_server.py MISTAKE` and SGLang's own command line behind it.

The embedded server answers; what goes in and comes out is falsified here. paths.sglang_python starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import aiohttp
import torch
from aiohttp import web
from PIL import Image

from core.config import Config
from launcher.roles.embedded_server import build

FACTOR = 1.6
Body = dict[str, Any]


def hotter(body: Body) -> None:
    if "sampling_params" in body and body["sampling_params"].get("temperature"):
        body["sampling_params"]["temperature"] *= FACTOR


def without_bans(body: Body) -> None:
    if "sampling_params" in body:
        body["sampling_params"]["min_new_tokens"] = 0


def other_weights(body: Body) -> None:
    if "weight_version" in body:
        body["model_path"] = os.environ["OTHER_MODEL"]


def without_images(body: Body) -> None:
    body["image_data"] = [_grey(url) for url in body.get("image_data") or []]


def _grey(url: str) -> str:
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    file = io.BytesIO()
    Image.new("RGB", image.size, (122, 116, 104)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def other_ids(answer: Body) -> None:
    if answer.get("prompt_token_ids"):
        answer["prompt_token_ids"][-1] += 1


ASKED = {"temperature": hotter, "bans": without_bans, "weights": other_weights, "images": without_images}
ANSWERED = {"ids": other_ids}


def front(mistake: str, inner: str, name: str) -> web.Application:
    asked, answered = ASKED.get(mistake), ANSWERED.get(mistake)

    async def models(http: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name}]})

    async def forward(http: web.Request) -> web.Response:
        body = await http.json() if http.can_read_body else None
        if asked is not None and body:
            asked(body)
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session,
            session.request(http.method, inner + http.path, json=body) as reply,
        ):
            answer = await reply.json()
            if answered is not None:
                answered(answer)
            return web.json_response(answer, status=reply.status)

    app = web.Application(client_max_size=256 << 20)
    app.add_routes([web.get("/v1/models", models), web.route("*", "/{path:.*}", forward)])
    return app


async def serve(mistake: str, model: Path, port: int, name: str, context: int) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    config = Config.model_validate(
        {
            "experiment_name": "broken",
            "trial_name": mistake,
            "train_dataset": {"path": "none", "batch_size": 1},
            "actor": {"path": str(model)},
            "embedded": {"context_length": context},
        }
    )
    server = build(model, config, "cpu", None)
    server.engine.start()
    runner = web.AppRunner(front(mistake, await server.start(), name), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await stop.wait()
    await runner.cleanup()
    await asyncio.to_thread(server.engine.stop)
    await server.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mistake", choices=["none", *ASKED, *ANSWERED])
    for flag in ("--model-path", "--served-model-name"):
        parser.add_argument(flag, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context-length", type=int, default=2048)
    words, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    asyncio.run(serve(words.mistake, Path(words.model_path), words.port, words.served_model_name, words.context_length))


if __name__ == "__main__":
    sys.exit(main())
