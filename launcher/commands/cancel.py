"""cancel: asks the lead daemon to end the run and waits until it has. Nothing is signalled from here."""

from __future__ import annotations

import argparse
import json
import sys
import time

from core.config import UserError
from core.rpc.client import Client
from core.rpc.errors import RpcError
from launcher.find_run import find_run
from launcher.liveness import look
from launcher.node.state import read_state
from launcher.run_dir import RunDir

PATIENCE_SECS = 60.0


class CancelError(UserError):
    """The run could not be cancelled."""


def run(arguments: argparse.Namespace) -> int:
    run_dir = find_run(arguments.run)
    said = cancel(run_dir)
    state = read_state(run_dir)
    if arguments.json:
        print(json.dumps({"run_dir": str(run_dir.root), "phase": state.phase if state else None, "message": said}))
    else:
        print(said)
    return 0


def cancel(run_dir: RunDir) -> str:
    deadline = time.monotonic() + PATIENCE_SECS
    found = look(run_dir)
    while found.alive and found.rendezvous is None and time.monotonic() < deadline:  # it is just being started
        time.sleep(0.2)
        found = look(run_dir)
    if not found.alive:
        said = "never started" if found.state is None else f"{found.state.phase}" if found.ended else "dead"
        return f"{run_dir.root} is not alive ({said}): nothing to cancel"
    if found.rendezvous is None:
        raise CancelError(f"{run_dir.root} is starting, and its daemon did not come up within {PATIENCE_SECS:.0f} s")
    client = Client(found.rendezvous.daemon, run_dir.read_token(), timeout=5.0)
    try:
        client.post("/stop", {}, request_id="cancel")
    except RpcError as error:
        raise CancelError(f"its daemon cannot be told ({error}); is this machine on the run's network?") from error
    while time.monotonic() < deadline:
        state = read_state(run_dir)
        if state is not None and state.phase.final:
            return f"{state.phase}: {run_dir.root}"
        time.sleep(0.1)
    print(f"still ending after {PATIENCE_SECS:.0f} s", file=sys.stderr)
    return f"stopping: {run_dir.root}"
