"""A vLLM or SGLang server of a run: started with its own Python, behind a proxy that wants the run's token.

Owns the choice of the Python and the place of the server; core.inference.process owns its life. It ends when the server
does, so that the node daemon sees one process: restarts, back-off and giving up are the daemon's.
"""

from __future__ import annotations

import asyncio
import functools
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from core.config import Config, load
from core.data.hub import resolve
from core.inference.child import COMPILED, environment
from core.inference.commands import Launch, Seat, launch
from core.inference.container import Container, NoContainerError, directories_of, inside, program
from core.inference.process import NotReadyError, ServerProcess, Wanted
from launcher.node.agreed import agreed
from launcher.node.specs import CANNOT_GO_ON
from launcher.planning.layout import Partition, Plan, Server
from launcher.roles import arguments
from launcher.roles.server_parts import BrokenError, Notices, follow
from launcher.servers.environment import container_of, python_of


def wanted(config: Config, plan: Plan, partition: Partition, args: arguments.RoleArguments) -> Wanted:
    server = planned_server(partition, args)
    model = resolve(config.actor.path, cache=config.paths.cache, kind="model")
    seat = Seat(
        python=python_of(partition.backend, config, plan.device),
        # the links of its files mean the same inside then
        model=str(model.resolve() if container_of(partition.backend, config) else model),
        served_name="",
        device=plan.device,
        port=0,
        tensor=partition.t,
        pipeline=partition.p,
        nodes=server.parts,
        node_rank=server.part,
        host=args.host,
    )
    several = server.parts > 1
    return Wanted(
        partition.backend,
        seat,
        weights_root=args.local.parent if several else args.local,
        token=args.run_dir.read_token(),
        links=agreed(args.local) if several else None,
        ready_secs=config.rollout.setup_timeout,
        request_secs=config.rollout.request_timeout,
    )


def planned_server(partition: Partition, args: arguments.RoleArguments) -> Server:
    return next(each for each in partition.nodes[args.node].servers if each.process == args.name)


async def serve(config: Config, plan: Plan, args: arguments.RoleArguments) -> int:
    """Serves until SIGTERM (0) or until the server's process, or that of a part of it elsewhere, ends (1)."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    partition = plan.partition(args.partition)
    assert partition is not None
    backend, server = partition.backend, planned_server(partition, args)
    log = Path(args.run_dir.log(args.attempt, args.partition, args.node, args.name))
    one = wanted(config, plan, partition, args)
    try:
        build = builder(config, plan, backend, one, args)
    except NoContainerError as error:
        print(f"NoContainerError: {error}", file=sys.stderr, flush=True)
        return CANNOT_GO_ON
    if server.parts == 1:
        return await _serve(ServerProcess(one, build, log=log), args, stop)
    notices = Notices(args.daemon, one.token, server)
    try:
        if server.part == 0:
            head = ServerProcess(one, build, log=log, announce=notices.announce)
            return await _serve(head, args, stop, notices)
        patience = config.rollout.setup_timeout
        return await follow(notices, args.name, one.seat, build, log=log, patience=patience, stop=stop.wait())
    except BrokenError as error:
        traceback.print_exc()  # the last in the log, after what the server says as it ends: it is the reason
        return error.status
    finally:
        await notices.close()


def builder(
    config: Config, plan: Plan, backend: str, one: Wanted, args: arguments.RoleArguments
) -> Callable[[Seat], Launch]:
    """What gives the command of a seat; in the server's container where it has one."""
    image = container_of(backend, config)
    if image is None:
        return functools.partial(launch, backend, config)
    compiled = environment({})[COMPILED]
    Path(compiled).mkdir(parents=True, exist_ok=True)
    seen = (*directories_of(Path(one.seat.model)), str(args.local.parent), compiled)
    container = Container(image, program(shutil.which, image), plan.device == "cuda", seen)
    return lambda seat: inside(launch(backend, config, seat), container, seat.directory)


async def _serve(
    server: ServerProcess, args: arguments.RoleArguments, stop: asyncio.Event, notices: Notices | None = None
) -> int:
    stopping = asyncio.create_task(stop.wait())
    starting = asyncio.create_task(server.start())
    broken = [asyncio.create_task(notices.until_broken())] if notices is not None else []
    try:
        await asyncio.wait([starting, stopping, *broken], return_when=asyncio.FIRST_COMPLETED)
        ending: list[asyncio.Task[int]] = []
        if starting.done():
            url = starting.result()
            await asyncio.to_thread(arguments.register, args, url)
            print(f"serves at {url}", flush=True)
            assert server.process is not None
            ending = [asyncio.create_task(server.process.wait())]
            await asyncio.wait([*ending, stopping, *broken], return_when=asyncio.FIRST_COMPLETED)
        if stopping.done():
            return 0
        if broken and broken[0].done():
            raise BrokenError(broken[0].result())
        print(f"the server ended with status {ending[0].result()}", file=sys.stderr, flush=True)
        return 1
    except NotReadyError as error:
        first, *more = str(error).splitlines()
        absent = await notices.absent() if notices is not None else ""
        print("\n".join([f"NotReadyError: {first}{absent}", *more]), file=sys.stderr, flush=True)
        return 1
    finally:
        for task in (starting, stopping, *broken):
            task.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await server.stop()


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments.parse(sys.argv[1:] if argv is None else argv)
    config = load(args.run_dir.config, [])
    return asyncio.run(serve(config, Plan.from_json(args.run_dir.plan.read_text()), args))


if __name__ == "__main__":
    sys.exit(main())
