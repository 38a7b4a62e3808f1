"""A vLLM or SGLang server of a run: started with its own Python, behind a proxy that wants the run's token.

Owns the choice of the Python and the place of the server; core.inference.process owns its life. It ends when the server
does, so that the node daemon sees one process: restarts, back-off and giving up are the daemon's.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from core.config import Config, load
from core.data.hub import resolve
from core.inference.commands import Seat, launch
from core.inference.process import NotReadyError, ServerProcess, Wanted
from launcher.planning.layout import Partition, Plan
from launcher.roles import arguments
from launcher.servers.environment import python_of


def wanted(config: Config, plan: Plan, partition: Partition, args: arguments.RoleArguments) -> Wanted:
    model = resolve(config.actor.path, cache=config.paths.cache, kind="model")
    seat = Seat(
        python=python_of(partition.backend, config, plan.device),
        model=str(model),
        served_name="",
        device=plan.device,
        port=0,
        tensor=partition.t,
        pipeline=partition.p,
    )
    return Wanted(
        partition.backend,
        seat,
        weights_root=args.local,
        token=args.run_dir.read_token(),
        host=args.host,
        ready_secs=config.rollout.setup_timeout,
        request_secs=config.rollout.request_timeout,
    )


async def serve(config: Config, plan: Plan, args: arguments.RoleArguments) -> int:
    """Serves until SIGTERM (0) or until the server's process ends (1)."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    partition = plan.partition(args.partition)
    assert partition is not None
    backend = partition.backend
    log = args.run_dir.log(args.attempt, args.partition, args.node, args.name)
    server = ServerProcess(
        wanted(config, plan, partition, args), lambda seat: launch(backend, config, seat), log=Path(log)
    )
    stopping = asyncio.create_task(stop.wait())
    try:
        starting = asyncio.create_task(server.start())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        url = starting.result()
        await asyncio.to_thread(arguments.register, args, url)
        print(f"{backend} serves {config.actor.path} at {url}", flush=True)
        assert server.process is not None
        ended = asyncio.create_task(server.process.wait())
        await asyncio.wait([ended, stopping], return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            return 0
        print(f"{backend} ended with status {ended.result()}", file=sys.stderr, flush=True)
        return 1
    except NotReadyError as error:
        print(f"NotReadyError: {backend} {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        await server.stop()


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments.parse(sys.argv[1:] if argv is None else argv)
    config = load(args.run_dir.config, [])
    return asyncio.run(serve(config, Plan.from_json(args.run_dir.plan.read_text()), args))


if __name__ == "__main__":
    sys.exit(main())
