"""serve: the inference partition alone, attached; says where its servers answer, and stays until Ctrl-C."""

from __future__ import annotations

import argparse
import sys
import threading
import time

from core.config import load
from core.rpc.client import Client
from core.rpc.errors import RpcError
from launcher.allocation import Allocation, parse
from launcher.attached import Attendance, ending_text
from launcher.commands.plan import places
from launcher.launch import Launch, begin
from launcher.node.state import Phase, read_rendezvous
from launcher.plan import PlanError, Problem, settle
from launcher.planning.change import with_value
from launcher.planning.printing import problems_text
from launcher.schedulers.local import LocalScheduler

POLL_SECS = 0.5


def run(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, arguments.overrides)
    try:
        servers = [each for each in parse(config.allocation_mode).components if each.is_inference]
        if not servers:
            text = f"{config.allocation_mode!r} has no inference partition; write one, as in sglang:d4"
            raise PlanError([Problem("allocation_mode", text)])
        config = with_value(config, "allocation_mode", str(Allocation(((servers[0],),))))
        config, planned = settle(config, emulated=arguments.emulate)
        for line in (*planned.swaps, *planned.warnings):
            print(f"note: {line}", file=sys.stderr)
        launch = begin(config, planned)
    except PlanError as error:
        print(problems_text(error, places(arguments.config, arguments.overrides)), file=sys.stderr)
        return 2
    print(f"run directory {launch.run_dir.root} (attempt {launch.attempt})", file=sys.stderr)
    placement = LocalScheduler().place(launch, attached=True)
    threading.Thread(target=tell, args=(launch,), daemon=True).start()
    state = Attendance(launch, placement).attend(quiet=True)
    print(ending_text(launch.run_dir, state), file=sys.stderr)
    return 0 if state.phase in (Phase.DONE, Phase.CANCELLED) else 1


def tell(launch: Launch) -> None:
    """One line for each server as it comes up, and again where it comes back at another address."""
    told: dict[str, str] = {}
    token = launch.run_dir.read_token()
    print(f"the token they want: {launch.run_dir.token}", file=sys.stderr, flush=True)
    while True:
        found = read_rendezvous(launch.run_dir, launch.attempt)
        if found is not None:
            try:
                rows = Client(found.daemon, token).get("/registry", timeout=10).get("servers", [])
            except RpcError:
                rows = []
            for row in rows:
                if row["state"] == "up" and told.get(row["name"]) != row["url"]:
                    told[row["name"]] = row["url"]
                    print(f"{row['name']} {row['backend']} {row['url']}", flush=True)
        time.sleep(POLL_SECS)
