"""Files by which a run tells others about itself: state.json, rendezvous.json and the heartbeat.

One writer each: the launcher until the lead daemon is up, then the lead daemon (training node 0; serving alone,
inference node 0). A state file says what was last known, never that anything is alive: launcher.liveness decides that.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from core.telemetry.files import write_atomic
from launcher.damaged import read_object, refusing
from launcher.planning.layout import Plan
from launcher.run_dir import FULL, RunDir, RunDirError

BEAT_SECS = 1.0


class Phase(StrEnum):
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    PREEMPTED = "preempted"  # stopped by the cluster; the next attempt goes on
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        return self in (Phase.DONE, Phase.FAILED, Phase.CANCELLED)


@dataclass(frozen=True)
class RunError:
    """The first error of a run: which process, its last line, its traceback, its log.

    `for_good`: going on would come to the same before something is mended.
    """

    process: str
    message: str
    traceback: str = ""
    log: str = ""
    for_good: bool = False


@dataclass(frozen=True)
class State:
    phase: Phase
    attempt: int
    generation: int = 0
    step: int = 0
    launched: float = 0.0
    updated: float = 0.0
    job_id: str | None = None
    error: RunError | None = None


@dataclass(frozen=True)
class Rendezvous:
    """Where the lead daemon of an attempt and its TCPStore listen."""

    daemon: str
    store: str
    host: str
    attempt: int
    pid: int
    started: float


def heartbeat_file(run_dir: RunDir) -> Path:
    return run_dir.root / "heartbeat"


def processes_lock(run_dir: RunDir) -> Path:
    """Held (shared) by every process of an attempt on one host, through a descriptor that they inherit."""
    return run_dir.root / ".processes.lock"


def beat(run_dir: RunDir) -> None:
    path = heartbeat_file(run_dir)
    path.touch(mode=0o600)
    os.utime(path)


def write_state(run_dir: RunDir, state: State) -> State:
    stamped = dataclasses.replace(state, updated=time.time())
    text = json.dumps(dataclasses.asdict(stamped), indent=1) + "\n"
    try:
        write_atomic(run_dir.state, text)
    except OSError as error:
        # how it ended is worth the risk of a torn file
        if error.errno not in FULL or not stamped.phase.final or not _overwrite(run_dir.state, text.encode()):
            raise
    return stamped


def _overwrite(path: Path, data: bytes) -> bool:
    """On a full disk: within the room that the file has already. False where that does not do."""
    handle = os.open(path, os.O_WRONLY)
    try:
        found = os.fstat(handle)
        return len(data) <= found.st_blocks * 512 and os.pwrite(handle, data.ljust(found.st_size), 0) >= len(data)
    except OSError:
        return False
    finally:
        os.close(handle)


def read_state(run_dir: RunDir) -> State | None:
    found = read_object(run_dir.state)
    if found is None:
        return None
    with refusing(run_dir.state, found, ("attempt", "generation", "step", "launched", "updated")):
        error = found.get("error")
        fields = {each.name: found[each.name] for each in dataclasses.fields(State) if each.name in found}
        return State(**{**fields, "phase": Phase(found["phase"]), "error": RunError(**error) if error else None})


def write_rendezvous(run_dir: RunDir, rendezvous: Rendezvous) -> None:
    write_atomic(run_dir.rendezvous, json.dumps(dataclasses.asdict(rendezvous), indent=1) + "\n")


def read_rendezvous(run_dir: RunDir, attempt: int | None = None) -> Rendezvous | None:
    """The rendezvous of this attempt (any attempt when None); one of an earlier attempt is as good as none."""
    found = read_object(run_dir.rendezvous)
    if found is None or (attempt is not None and found.get("attempt") != attempt):
        return None
    with refusing(run_dir.rendezvous, found, ("pid", "started")):
        return Rendezvous(**found)


def read_plan(run_dir: RunDir) -> Plan:
    """Of a run that was started."""
    found = read_object(run_dir.plan)
    if found is None:
        raise RunDirError(f"{run_dir.plan} is missing: this run cannot go on; start another one")
    with refusing(run_dir.plan, found):
        return Plan.from_json(json.dumps(found))
