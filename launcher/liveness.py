"""Is a run alive? Judged from outside: does its lead daemon answer, and does its heartbeat file move on our clock.

state.json says what was last known and never decides. Reads only; asks the daemon with short deadlines.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from core.rpc.client import Client
from core.rpc.errors import RpcError
from launcher.node.state import BEAT_SECS, Phase, Rendezvous, State, heartbeat_file, read_rendezvous, read_state
from launcher.run_dir import RunDir
from launcher.slurm.queue import WATCH, JobView, jobs_of

ASK_SECS = 3.0
WATCH_SECS = 3 * BEAT_SECS
STARTING_SECS = 30.0
"""From the launcher's first beat until the lead daemon must have said where it is."""


@dataclass(frozen=True)
class Liveness:
    """`alive` covers starting; a run that is not alive either ended by itself (state.phase.final) or is dead."""

    alive: bool
    state: State | None
    rendezvous: Rendezvous | None = None
    answer: dict[str, Any] | None = None
    """/status of the lead daemon, when it answers."""
    last_beat: float | None = None
    jobs: dict[str, JobView] | None = None
    """A Slurm run's jobs; None where Slurm does not answer or has no part in it."""

    @property
    def ended(self) -> bool:
        return not self.alive and self.state is not None and self.state.phase.final

    @property
    def dead(self) -> bool:
        return not self.alive and self.state is not None and not self.state.phase.final


def look(run_dir: RunDir) -> Liveness:
    state = read_state(run_dir)
    if state is None:
        return Liveness(False, None)
    job_ids = jobs_of(run_dir)
    if job_ids:
        return _look_at_jobs(run_dir, state, job_ids)
    beat = _beat_time(run_dir)
    rendezvous = read_rendezvous(run_dir, state.attempt)
    if rendezvous is None:
        starting = not state.phase.final and beat is not None and time.time() - beat < STARTING_SECS
        return Liveness(starting, state, None, None, beat)
    answer, gone = _ask(run_dir, rendezvous)
    if answer is not None:
        return Liveness(True, state, rendezvous, answer, beat)
    if state.phase.final:
        return Liveness(False, state, rendezvous, None, beat)
    alive = not gone and _beats(run_dir)
    return Liveness(alive, read_state(run_dir), rendezvous, None, _beat_time(run_dir))


def _look_at_jobs(run_dir: RunDir, state: State, job_ids: list[str]) -> Liveness:
    """Slurm knows whether it is alive, from the queue on; the lead daemon how it is. Time in the queue is nobody's."""
    views = WATCH.views(job_ids)
    beat, answer = _beat_time(run_dir), None
    rendezvous = read_rendezvous(run_dir, state.attempt)
    if rendezvous is not None and not state.phase.final:
        answer, _ = _ask(run_dir, rendezvous)
        state = read_state(run_dir) or state  # it may have ended just now
    if answer is not None:
        alive = True
    elif state.phase in (Phase.DONE, Phase.CANCELLED):
        alive = False
    elif views is None:  # Slurm does not answer
        alive = not state.phase.final and beat is not None and time.time() - beat < STARTING_SECS
    else:
        alive = any(view.alive for view in views.values())
    return Liveness(alive, state, rendezvous, answer, beat, views)


def _ask(run_dir: RunDir, rendezvous: Rendezvous) -> tuple[dict[str, Any] | None, bool]:
    """Its answer, and whether its silence proves that it is gone (nobody, or somebody else, has its port)."""
    client = Client(rendezvous.daemon, run_dir.read_token(), timeout=ASK_SECS)
    try:
        answer = client.get("/status")
    except RpcError as error:
        return None, not (error.unreachable and "no answer within" in error.message)
    finally:
        client.close()
    same = answer.get("attempt") == rendezvous.attempt and answer.get("pid") == rendezvous.pid
    return (answer, False) if same else (None, True)


def _beats(run_dir: RunDir) -> bool:
    """A daemon that does not answer (a busy or distant machine) is alive if its heartbeat file still changes."""
    first = _beat_time(run_dir)
    deadline = time.monotonic() + WATCH_SECS
    while time.monotonic() < deadline:
        time.sleep(BEAT_SECS / 4)
        if _beat_time(run_dir) != first:
            return True
    return False


def _beat_time(run_dir: RunDir) -> float | None:
    try:
        return heartbeat_file(run_dir).stat().st_mtime
    except OSError:
        return None
