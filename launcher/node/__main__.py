"""`python -P -m launcher.node …`: the node daemon as a process. Started by a scheduler, never by hand."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import fcntl
import os
import signal
import sys
from pathlib import Path

from core.config import Config, load
from launcher.node.daemon import Daemon, Settings
from launcher.node.local_dir import local_root
from launcher.node.specs import LOOPBACK, ROLES, NodeContext
from launcher.node.state import processes_lock
from launcher.planning.layout import Plan
from launcher.run_dir import RunDir


def main(argv: list[str]) -> int:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    parser = argparse.ArgumentParser(prog="launcher.node")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--partition", required=True)
    parser.add_argument("--node", type=int, required=True)
    parser.add_argument("--host", default=LOOPBACK, help="the run's interface on this node")
    parser.add_argument("--roles", default=ROLES, help="package of the processes' modules")
    parser.add_argument("--grace", type=float, default=15.0, help="seconds between TERM and KILL")
    parser.add_argument("--interface", default="", help="its name")
    parser.add_argument("--on-cluster", action="store_true", help="TERM and USR2 are a batch scheduler's warnings")
    arguments = parser.parse_args(argv)
    run_dir = RunDir(arguments.run_dir)
    config = load(run_dir.config, [])
    plan = Plan.from_json(run_dir.plan.read_text())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    name = f"{arguments.partition}-{arguments.node}"
    context = NodeContext(
        run_dir=run_dir,
        plan=plan,
        attempt=arguments.attempt,
        partition=arguments.partition,
        node=arguments.node,
        local=local_root(config.paths.local, plan.run_id, run_dir) / name,
        host=arguments.host,
        roles=arguments.roles,
        grace=arguments.grace,
        visible_gpus=tuple(each for each in visible.split(",") if each),
        env_vars=env_vars(config, arguments.partition),
        keep_open=(hold(run_dir),),
        interface=arguments.interface,
        on_cluster=arguments.on_cluster,
    )
    return asyncio.run(serve(context, settings(config)))


def hold(run_dir: RunDir) -> int:
    """The lock that tells the next attempt that processes of this one are still there."""
    handle = os.open(processes_lock(run_dir), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(handle, fcntl.LOCK_SH)
    return handle


async def serve(context: NodeContext, chosen: Settings) -> int:
    return await Daemon(context, chosen).run()


def env_vars(config: Config, partition: str) -> dict[str, str]:
    """`scheduling_spec.env_vars` of the section that this partition's processes come from."""
    section = config.actor if partition == "training" else config.rollout
    return {key: value for spec in section.scheduling_spec for key, value in spec.env_vars.items()}


def settings(config: Config) -> Settings:
    recovers = config.recover.mode in ("on", "auto")
    return Settings(
        retries=config.recover.retries if recovers else 0,
        watchdog_secs=config.watchdog_secs,
        deadlines=config.deadlines,
        verify=config.weight_sync.verify,
        visible_secs=config.weight_sync.visible_secs,
        setup_secs=config.rollout.setup_timeout,
        preempted_secs=config.slurm.signal_lead_secs / 2,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
