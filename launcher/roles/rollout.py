"""The rollout process: wires the rollout service to the run directory and serves until it is told to stop.

Owns the choice of files and limits; core.rollout owns the work. Imports no torch.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from core.config import load
from core.data.hub import resolve
from core.data.tokenizer import Tokenizer
from core.rollout.service import Routes
from core.rollout.session import Places, Session
from core.rpc.service import Service
from launcher.node.specs import CANNOT_GO_ON
from launcher.planning.layout import Plan
from launcher.roles import arguments
from launcher.roles.data import longest_prompt


async def serve(options: arguments.RoleArguments) -> int:
    """Serves until SIGTERM or a failure that ends the run; returns the exit status."""
    run_dir = options.run_dir
    config = load(run_dir.config, [])
    plan = Plan.from_json(run_dir.plan.read_text())
    backend = next((part.backend for part in plan.partitions if part.name == "inference"), None)
    model = resolve(config.tokenizer_path or config.actor.path, cache=config.paths.cache, kind="model")
    longest, _ = longest_prompt(config, backend)
    token = run_dir.read_token()
    session = Session(
        config,
        Places(run_dir.batches, run_dir.images, run_dir.index, run_dir.void, run_dir.weights, run_dir.user_code()),
        Tokenizer(model),
        token=token,
        daemon=options.daemon,
        attempt=options.attempt,
        context_length=None if longest is None else longest + config.gconfig.max_new_tokens,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, session.stop)
    service = Service("rollout", token, status=session.status, metrics=session.metrics)
    Routes(session, can_evaluate=config.valid_dataset is not None).add_to(service)
    url = await service.start(options.host)
    await asyncio.to_thread(arguments.register, options, url)
    print(f"rollout service at {url}, pid {os.getpid()}", flush=True)
    try:
        return CANNOT_GO_ON if await session.run() else 0
    finally:
        await service.stop()


def main(argv: Sequence[str] | None = None) -> int:
    return asyncio.run(serve(arguments.parse(sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())
