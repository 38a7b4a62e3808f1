"""An embedded server process: the trainer's own model behind SGLang's protocol.

Owns the building of the model from the run's configuration and the life of the process; core.inference.embedded owns
serving.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from core.config import Config, load
from core.data.hub import resolve
from core.inference.embedded.assembly import assemble
from core.inference.embedded.server import EmbeddedServer
from launcher.planning.layout import Plan
from launcher.roles import arguments
from models.archon.registry import family_of


def build(directory: Path, config: Config, device: str, token: str | None) -> EmbeddedServer:
    """The model of `directory`, loaded, as a server that is not started yet."""
    family = family_of(directory)
    dtype = getattr(torch, config.embedded.dtype)
    args = family.args.from_pretrained(directory, dtype=dtype)
    model = family.model(args).to(device).eval().requires_grad_(False)
    adapter = family.adapter(args)

    def load_weights(path: Path) -> None:
        adapter.load_into(model, path)

    return assemble(
        model,
        args,
        load_weights,
        directory=directory,
        token=token,
        context_length=config.embedded.context_length,
        max_running_requests=config.embedded.max_running_requests,
        max_prefill_tokens=config.embedded.max_prefill_tokens,
        deterministic=config.deterministic,
        device=device,
        dtype=dtype,
    )


async def serve(server: EmbeddedServer, args: arguments.RoleArguments) -> int:
    """Serves until SIGTERM (0) or until the engine's thread dies (1)."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    server.engine.start()
    url = await server.start(args.host)
    await asyncio.to_thread(arguments.register, args, url)
    print(f"serving {server.engine.model_path} at {url}", flush=True)
    while not stop.is_set() and server.engine.alive:
        try:
            await asyncio.wait_for(stop.wait(), 0.5)
        except TimeoutError:
            continue
    await asyncio.to_thread(server.engine.stop)
    await server.stop()
    return 0 if server.engine.failure is None else 1


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments.parse(sys.argv[1:] if argv is None else argv)
    config = load(args.run_dir.config, [])
    plan = Plan.from_json(args.run_dir.plan.read_text())
    if plan.device == "cpu":
        torch.set_num_threads(1)
    directory = resolve(config.actor.path, cache=config.paths.cache, kind="model")
    server = build(directory, config, "cuda:0" if plan.device == "cuda" else "cpu", args.run_dir.read_token())
    return asyncio.run(serve(server, args))


if __name__ == "__main__":
    sys.exit(main())
