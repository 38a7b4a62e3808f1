"""status: how a run is, judged by its daemons and not by its files."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from typing import Any

from launcher.attached import error_lines, go_on
from launcher.find_run import find_run
from launcher.live import duration, number
from launcher.liveness import Liveness, look
from launcher.node.log_tail import TRACEBACK, last_error, tail
from launcher.node.state import Phase, RunError, State, read_plan
from launcher.run_dir import RunDir
from launcher.slurm.queue import JobView
from launcher.slurm.states import Fate

SILENT_SECS = 30.0


def run(arguments: argparse.Namespace) -> int:
    run_dir = find_run(arguments.run)
    found = look(run_dir)
    if arguments.json:
        print(json.dumps(status_object(run_dir, found), indent=1))
    else:
        print(status_text(run_dir, found, time.time()))
    return 0


def verdict(found: Liveness) -> str:
    if found.state is None:
        return "never started"
    if found.dead:
        return worst_fate(found.jobs) if found.jobs else "dead"
    if found.answer is None and found.jobs:
        said = job_verdict(found.state, found.jobs)
        if said != Fate.RUNNING or found.rendezvous is None:
            return said
    if found.alive and found.answer is None and found.rendezvous is not None:
        return "alive, but its daemon does not answer"
    return str(found.answer["phase"]) if found.answer else str(found.state.phase)


def worst_fate(jobs: dict[str, JobView]) -> str:
    """Of jobs that are over although the run did not say so itself: Slurm ended them."""
    fates = [view.fate for view in jobs.values()]
    return str(next((fate for fate in (Fate.FAILED, Fate.CANCELLED) if fate in fates), "dead"))


def job_verdict(state: State, jobs: dict[str, JobView]) -> str:
    """What Slurm's state of the job adds to the run's own record."""
    alive = [view for view in jobs.values() if view.alive]
    if not alive:
        return str(state.phase)
    return "pending" if all(view.fate is Fate.WAITING for view in alive) else str(alive[0].fate)


def status_object(run_dir: RunDir, found: Liveness) -> dict[str, Any]:
    error = error_of(run_dir, found)
    return {
        "run_dir": str(run_dir.root),
        "verdict": verdict(found),
        "alive": found.alive,
        "since": found.last_beat if found.dead else None,
        "state": dataclasses.asdict(found.state) if found.state else None,
        "error": dataclasses.asdict(error) if error else None,
        "daemon": found.answer,
        "jobs": {
            job: [dataclasses.asdict(seen) for seen in view.components] for job, view in (found.jobs or {}).items()
        },
        "resume": resume_line(run_dir, found.state) if not found.alive else None,
    }


def status_text(run_dir: RunDir, found: Liveness, now: float) -> str:
    lines = [f"{run_dir.root}: {verdict(found)}"]
    state = found.state
    if state is None:
        return lines[0]
    if found.dead and not found.jobs:
        lines = [dead_line(run_dir, found, now)]
    lines.append(f"  attempt {state.attempt}, generation {state.generation}, step {state.step}")
    lines += job_lines(run_dir, found)
    lines += silence_lines(found, now)
    if found.answer is not None:
        for name, child in found.answer["children"].items():
            lines.append(f"  {name:<12} {child['state']:<9} {child['url']}")
        for server in found.answer.get("servers", []):
            if server["name"] not in found.answer["children"]:  # on another node
                lines.append(f"  {server['name']:<12} {server['state']:<9} {server['url']}")
        for part in found.answer.get("parts", []):
            why = f": {part['why']}" if part["why"] else ""
            where = f"part {part['part']} of {part['server']}, on {part['node']}"
            lines.append(f"  {part['name']:<12} {part['state']:<9} {where}{why}")
        for name, said in found.answer["services"].items():
            lines.append(f"  {name}: {said if isinstance(said, str) else _short(said)}")
    error = error_of(run_dir, found)
    if error is not None:
        lines += ["  last error:", *(f"  {line}" for line in error_lines(error))]
    if not found.alive:
        lines.append(f"  {go_on(state)}: {resume_line(run_dir, state)}")
    return "\n".join(lines)


def job_lines(run_dir: RunDir, found: Liveness) -> list[str]:
    """Components, their nodes, why they wait; then what matters of a running one in a line."""
    lines = []
    names = [partition.name for partition in read_plan(run_dir).partitions] if found.jobs else []
    for job, view in (found.jobs or {}).items():
        for index, seen in enumerate(view.components):
            name = names[index] if len(view.components) == len(names) and len(names) > 1 else "job"
            where = f" on {seen.nodes}" if seen.nodes else f", {seen.count} nodes" if seen.count else ""
            wait = ""
            if seen.meaning.fate is Fate.WAITING:
                wait = f" ({seen.reason or 'no reason given'}), starts {seen.start or 'at a time not known yet'}"
            job_id = job if len(view.components) == 1 else seen.job_id
            lines.append(f"  {job_id} {name}: {seen.meaning.text}{where}{wait}")
    services = found.answer["services"] if found.answer else {}
    trainer, rollout = services.get("trainer"), services.get("rollout")
    if isinstance(rollout, dict) and isinstance(rollout.get("servers"), dict):
        # one that is paused or loads is up: it takes a new version between two steps
        up = sum(each.get("state") not in ("starting", "out") for each in rollout["servers"].values())
        lines.append(f"  servers up: {up} of {len(rollout['servers'])}")
    if isinstance(trainer, dict) and trainer.get("eta_secs") is not None:
        lines.append(f"  ends in about {duration(trainer['eta_secs'])}")
    return lines


def silence_lines(found: Liveness, now: float) -> list[str]:
    """Of a job that runs on although its lead daemon is gone, where no other daemon is left to say so."""
    silent = 0.0 if found.last_beat is None else now - found.last_beat
    if not found.alive or found.answer is not None or found.rendezvous is None or silent < SILENT_SECS:
        return []
    where = found.rendezvous.host
    return [f"  no heartbeat for {silent:.0f} s: the lead daemon or its node ({where}) is gone or cut off"]


def dead_line(run_dir: RunDir, found: Liveness, now: float) -> str:
    assert found.state is not None
    if found.last_beat is None:
        when = "before its first heartbeat"
    else:
        ago = max(0, round(now - found.last_beat))
        when = f"since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(found.last_beat))} ({ago} s ago)"
    return f"{run_dir.root}: dead {when}; its daemons are gone, the last phase they wrote was {found.state.phase}"


def error_of(run_dir: RunDir, found: Liveness) -> RunError | None:
    """The error the run recorded; of a dead run that recorded none, the newest traceback in its logs."""
    if found.state is None:
        return None
    if found.state.error is not None or not found.dead:
        return found.state.error
    logs = sorted((run_dir.logs / str(found.state.attempt)).glob("*/*.log"), key=lambda path: path.stat().st_mtime)
    for path in reversed(logs):
        if any(line.strip() == TRACEBACK for line in tail(path, lines=2000)):
            error = last_error(path)
            return RunError(path.stem, error.message, error.traceback, str(path))
    message = "no process wrote an error: its daemons were killed, or their machine went down"
    return RunError("daemons", message, log=str(run_dir.logs / str(found.state.attempt)))


def resume_line(run_dir: RunDir, state: State | None) -> str:
    """To be typed as it is: a run that is done goes on only with more to do."""
    more = f" total_train_steps={2 * max(1, state.step)}" if state and state.phase is Phase.DONE else ""
    return f"python -m launcher resume {run_dir.root}{more}"


def _short(said: dict[str, Any]) -> str:
    """What a person reads of a service: no moments in epoch seconds, and spans as the live view writes them."""
    keep = {key: value for key, value in said.items() if key not in ("name", "pid", "uptime", "since")}
    return ", ".join(_worded(key, value) for key, value in keep.items() if _plain(value))


def _worded(key: str, value: object) -> str:
    if key.endswith("_secs"):
        name = "phase lasts" if key == "phase_secs" else key.removesuffix("_secs")
        return f"{name} {duration(value)}"
    return f"{key} {number(value) if isinstance(value, float) else value}"


def _plain(value: object) -> bool:
    return isinstance(value, str | int | float | bool) or value is None
