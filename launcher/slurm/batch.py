"""Begin and end of an attempt, once per start of a job: `python -P -m launcher.slurm.batch start|finish RUN …`.

Runs on the job's first node, called by the batch script. `start` prints the number of this attempt, or nothing when
there is nothing left to do; "which attempt" is decided here and now, never stored when the job is submitted. `finish`
turns how the steps ended, and what the lead daemon wrote, into the job's exit status; 85 has the script ask for one
requeue. Neither calls Slurm: they may run in a container.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from core.config import Config, load
from launcher.node.state import Phase, RunError, State, beat, read_state, write_state
from launcher.run_dir import RunDir
from launcher.slurm.script import AGAIN_STATUS


def start(run_dir: RunDir) -> int | None:
    """The attempt that begins now; None when the run is over."""
    state = read_state(run_dir)
    if state is None:
        raise SystemExit(f"{run_dir.root} holds no run")
    if state.phase in (Phase.DONE, Phase.CANCELLED):
        say(f"{run_dir.root} is {state.phase}: nothing left to do")
        return None
    job = os.environ.get("SLURM_JOB_ID", "")
    if (
        state.phase is Phase.FAILED
        and not lost_a_daemon(state)
        and _begun_by(run_dir, state.attempt) not in (None, job)
    ):
        say(f"an earlier job of the chain failed ({state.error.process if state.error else 'no error'}): nothing to do")
        return None
    fresh = state.attempt
    while not _take(run_dir, fresh, job):
        fresh += 1
    if fresh != state.attempt:
        state = dataclasses.replace(state, attempt=fresh, generation=state.generation + 1)
    state = dataclasses.replace(state, phase=Phase.STARTING, launched=time.time(), job_id=job, error=None)
    write_state(run_dir, state)
    beat(run_dir)
    say(f"attempt {state.attempt} of {run_dir.root}, job {job}, after step {state.step}")
    return state.attempt


def _begun_by(run_dir: RunDir, attempt: int) -> str | None:
    try:
        return str(json.loads((run_dir.logs / str(attempt) / "job.json").read_text())["job"])
    except FileNotFoundError:
        return None


def _take(run_dir: RunDir, attempt: int, job: str) -> bool:
    """False when this attempt has been begun before, by this job or another."""
    logs = run_dir.logs / str(attempt)
    logs.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with (logs / "job.json").open("x") as file:
            restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
            nodes = {key: value for key, value in os.environ.items() if key.startswith("VLM_RL_") and "NODES" in key}
            file.write(json.dumps({"job": job, "restarts": restarts, "begun": time.time(), "nodes": nodes}))
    except FileExistsError:
        return False
    if not (logs / "config.yaml").exists():
        (logs / "config.yaml").write_text(run_dir.config.read_text())
    return True


def finish(run_dir: RunDir, attempt: int, statuses: Mapping[str, int]) -> int:
    """The batch script's exit status."""
    state = read_state(run_dir)
    if state is None or state.attempt != attempt:
        say(f"{run_dir.root} is no longer in attempt {attempt}")
        return 1
    say(f"attempt {attempt} ended: {state.phase}, " + ", ".join(f"{name} {code}" for name, code in statuses.items()))
    if state.error is not None:
        say(f"{state.error.process}: {state.error.message}")
    if state.phase is Phase.DONE and not any(statuses.values()):
        return 0
    config = load(run_dir.config, [])
    if not state.phase.final and state.phase is not Phase.PREEMPTED:
        reason = broken_off(run_dir, attempt, statuses)
        preempted = AGAIN_STATUS in statuses.values() and reason is None
        phase = Phase.PREEMPTED if preempted else Phase.FAILED
        reason = reason or lost_nodes(run_dir, attempt, statuses)
        state = write_state(run_dir, dataclasses.replace(state, phase=phase, error=reason))
    if state.phase is Phase.DONE:  # the run is whole; only a step's own end was not clean
        return 0
    return AGAIN_STATUS if goes_on(config, state) else 1


def goes_on(config: Config, state: State) -> bool:
    """Whether to requeue: after a warning of the cluster always, after a lost daemon (its node, most likely) as often
    as recover.retries allows.
    """
    if not config.slurm.requeue:
        return False
    if state.phase is Phase.PREEMPTED:
        return True
    return lost_a_daemon(state) and config.recover.mode in ("on", "auto") and state.attempt <= config.recover.retries


def lost_a_daemon(state: State) -> bool:
    return state.phase is Phase.FAILED and state.error is not None and state.error.process.startswith("daemon of")


def broken_off(run_dir: RunDir, attempt: int, statuses: Mapping[str, int]) -> RunError | None:
    """The lead daemon wrote no end: what the steps tell. A step's 0 is not enough, only its daemon's record is."""
    verdict = run_dir.logs / str(attempt) / "preflight" / "verdict"
    if verdict.exists():
        return RunError("preflight", verdict.read_text().strip(), log=str(verdict.parent))
    if statuses and set(statuses.values()) <= {0, AGAIN_STATUS} and AGAIN_STATUS in statuses.values():
        return None
    for name, code in statuses.items():
        if code and not run_dir.log_file(attempt, name, 0, "daemon").exists():
            text = f"never started: its srun ended with status {code}; what it said is in {run_dir.submitit}/*.out"
            return RunError(f"daemon of {name}-0", text, log=str(run_dir.submitit))
    parts = [
        f"the step of {name} ended with 0, but its lead daemon never wrote that the run is done"
        if code == 0
        else f"the step of {name} ended with status {code}"
        for name, code in statuses.items()
    ] or ["no step reported its end"]
    return RunError("slurm", "; ".join(parts), log=str(run_dir.logs / str(attempt)))


def lost_nodes(run_dir: RunDir, attempt: int, statuses: Mapping[str, int]) -> RunError | None:
    """Slurm lost a node and warned the others: the srun of its step returned 0, which no daemon of this run did."""
    gone = [name for name, code in statuses.items() if code == 0]
    if not gone:
        return None
    begun = json.loads((run_dir.logs / str(attempt) / "job.json").read_text())
    nodes = ", ".join(begun["nodes"].get(f"VLM_RL_{name.upper()}_NODES", "?") for name in gone)
    text = f"Slurm lost a node of {nodes}: the step ended with 0, but its daemon never wrote that the run is done"
    return RunError(f"step of {' and '.join(gone)}", text, log=str(run_dir.logs / str(attempt)))


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} job: {text}", file=sys.stderr, flush=True)


def main(argv: list[str]) -> int:
    act, run_dir = argv[0], RunDir(Path(argv[1]))
    if act == "start":
        attempt = start(run_dir)
        print("" if attempt is None else attempt)
        return 0
    pairs = [word.rpartition("=") for word in argv[3:]]
    return finish(run_dir, int(argv[2]), {name: int(code) for name, _, code in pairs})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
