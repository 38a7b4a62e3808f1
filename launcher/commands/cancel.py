"""cancel: asks the lead daemon to end the run and waits until it has; on Slurm, then ends its jobs too.

No process is signalled from here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time

from core.config import UserError
from core.rpc.client import Client
from core.rpc.errors import RpcError
from launcher.find_run import find_run
from launcher.liveness import Liveness, look
from launcher.node.state import Phase, read_state, write_state
from launcher.run_dir import RunDir
from launcher.slurm.queue import is_mine, jobs_of, scancel

PATIENCE_SECS = 60.0


class CancelError(UserError):
    """The run could not be cancelled."""


def run(arguments: argparse.Namespace) -> int:
    run_dir = find_run(arguments.run)
    said = cancel(run_dir, yes=arguments.yes)
    state = read_state(run_dir)
    if arguments.json:
        print(json.dumps({"run_dir": str(run_dir.root), "phase": state.phase if state else None, "message": said}))
    else:
        print(said)
    return 0


def cancel(run_dir: RunDir, *, yes: bool = False) -> str:
    deadline = time.monotonic() + PATIENCE_SECS
    found = look(run_dir)
    job_ids = jobs_of(run_dir)
    if job_ids:
        return _cancel_jobs(run_dir, found, job_ids, yes=yes)
    while found.alive and found.rendezvous is None and time.monotonic() < deadline:  # it is just being started
        time.sleep(0.2)
        found = look(run_dir)
    if not found.alive:
        return _not_alive(run_dir, found)
    if found.rendezvous is None:
        raise CancelError(f"{run_dir.root} is starting, and its daemon did not come up within {PATIENCE_SECS:.0f} s")
    _tell(run_dir, found)
    if _await_end(run_dir, deadline):
        state = read_state(run_dir)
        assert state is not None
        return f"{state.phase}: {run_dir.root}"
    print(f"still ending after {PATIENCE_SECS:.0f} s", file=sys.stderr)
    return f"stopping: {run_dir.root}"


def _cancel_jobs(run_dir: RunDir, found: Liveness, job_ids: list[str], *, yes: bool) -> str:
    """The daemons first, so that they end what they started; then the whole job and every job of its chain."""
    if not found.alive:
        return _not_alive(run_dir, found)
    if found.jobs and not is_mine(found.jobs) and not yes and not _confirmed(found):
        raise CancelError(f"{run_dir.root} is not yours, and nothing was cancelled (--yes does not ask)")
    state = read_state(run_dir)
    assert state is not None
    if found.answer is not None:
        try:
            _tell(run_dir, found)
            _await_end(run_dir, time.monotonic() + PATIENCE_SECS)
        except CancelError as error:
            print(f"{error}; Slurm ends it", file=sys.stderr)
    scancel(job_ids)
    state = read_state(run_dir)
    if state is not None and not state.phase.final:
        write_state(run_dir, dataclasses.replace(state, phase=Phase.CANCELLED))
    return f"cancelled: {run_dir.root} (Slurm job {', '.join(job_ids)})"


def _confirmed(found: Liveness) -> bool:
    users = sorted({seen.user for view in (found.jobs or {}).values() for seen in view.components})
    if not sys.stdin.isatty():
        return False
    return input(f"this run's job belongs to {', '.join(users)}; cancel it? [y/N] ").strip().lower() in ("y", "yes")


def _not_alive(run_dir: RunDir, found: Liveness) -> str:
    said = "never started" if found.state is None else f"{found.state.phase}" if found.ended else "dead"
    return f"{run_dir.root} is not alive ({said}): nothing to cancel"


def _tell(run_dir: RunDir, found: Liveness) -> None:
    assert found.rendezvous is not None
    client = Client(found.rendezvous.daemon, run_dir.read_token(), timeout=5.0)
    try:
        client.post("/stop", {}, request_id="cancel")
    except RpcError as error:
        raise CancelError(f"its daemon cannot be told ({error}); is this machine on the run's network?") from error


def _await_end(run_dir: RunDir, deadline: float) -> bool:
    while time.monotonic() < deadline:
        state = read_state(run_dir)
        if state is not None and state.phase.final:
            return True
        time.sleep(0.1)
    return False
