"""Begins attempts: a new run directory from a configuration, or the next attempt of one that is there.

Owns the refusals (it is alive, it is there already, its last processes still end) and what is written before any
process starts; starting processes is a scheduler's business.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.config import Config, UserError, load
from core.telemetry.files import write_atomic
from launcher.fixed import differences, fixed_values
from launcher.liveness import look
from launcher.node.local_dir import local_root
from launcher.node.specs import ROLES
from launcher.node.state import Phase, State, beat, processes_lock, read_plan, read_state, write_state
from launcher.plan import Plan, settle
from launcher.planning.devices import require_gpus
from launcher.run_dir import RunDir, RunDirError, run_dir_of
from launcher.slurm.queue import forget_jobs

ENDING_SECS = 25.0
REFUSED = "sbatch"
"""The process that the error of a run names whose job Slurm did not take."""


class RunExistsError(UserError):
    """There is a run of this name."""


class AliveError(UserError):
    """The run is alive, so it cannot be started again."""


class ResumeError(UserError):
    """The run cannot go on as asked."""


@dataclass(frozen=True)
class Launch:
    """One attempt, ready to be placed by a scheduler."""

    run_dir: RunDir
    plan: Plan
    attempt: int
    roles: str = ROLES
    grace: float = 15.0
    daemon_secs: float = 30.0
    """How long a lead daemon may say nothing (deadlines.daemon)."""
    local: str | None = None
    """Where node-local directories go (paths.local)."""


def begin(config: Config, plan: Plan) -> Launch:
    """Attempt 1 in a new run directory."""
    run_dir = run_dir_of(config.cluster.fileroot, config.experiment_name, config.trial_name)
    _require_devices(config, plan, run_dir)
    with _only_one(run_dir):
        _refuse_existing(run_dir)
        run_dir.create()
        return _write(run_dir, config, plan, State(Phase.STARTING, 1, launched=time.time()))


def begin_again(run_dir: RunDir, overrides: Sequence[str]) -> Launch:
    """The next attempt of a run that is not alive, with overrides laid over its own configuration."""
    before = read_plan(run_dir)
    config, planned = settle_again(run_dir, before, overrides)
    _require_devices(config, planned, run_dir)
    with _only_one(run_dir):
        found = look(run_dir)
        name = run_dir.root
        if found.alive:
            raise AliveError(f"{name} is alive: `python -m launcher status {name}` shows it, `cancel` ends it")
        state = found.state
        if state is None:
            raise ResumeError(f"{name} has never been started: use run or submit")
        if state.phase is Phase.DONE and not overrides:
            raise ResumeError(
                f"{name} is done (step {state.step}); to train on, give it more to do, for example\n"
                f"  python -m launcher resume {name} total_train_steps={2 * max(1, state.step)}"
            )
        _await_last_processes(run_dir)
        run_dir.create()
        generation = state.generation + 1
        following = State(Phase.STARTING, state.attempt + 1, generation, state.step, launched=time.time())
        return _write(run_dir, config, planned, following)


def settle_again(run_dir: RunDir, before: Plan, overrides: Sequence[str]) -> tuple[Config, Plan]:
    config = load(run_dir.config, overrides)
    place = run_dir_of(config.cluster.fileroot, config.experiment_name, config.trial_name)
    if overrides and place.root.resolve() != run_dir.root.resolve():
        asked = [word for word in overrides if word.split("=")[0] in PLACE_KEYS]
        if asked:
            raise ResumeError(f"resume goes on in {run_dir.root}; {', '.join(asked)} would be another run")
    config, planned = settle(config, emulated=before.emulate, on_cluster=True, user_code=run_dir.user_code())
    changed = differences(fixed_values(load(run_dir.config, [])), fixed_values(config))
    if changed:
        raise ResumeError(
            f"{run_dir.root} cannot go on like this; start another run for: {'; '.join(changed)}\n"
            "  what may change on resume: frequencies, learning rate, layout, limits and deadlines, totals"
        )
    return config, dataclasses.replace(planned, swaps=[*before.swaps, *planned.swaps])


def _require_devices(config: Config, planned: Plan, run_dir: RunDir) -> None:
    """On a cluster the nodes are looked at when they are there (launcher.slurm.preflight)."""
    if config.scheduler.type == "slurm":
        return
    require_gpus(planned)
    local = local_root(config.paths.local, planned.run_id, run_dir)
    try:
        local.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        text = f"{local} cannot be made: {error.strerror}; name a directory of this machine that you may write"
        raise RunDirError(f"paths.local: {text}") from error
    with contextlib.suppress(OSError):  # each daemon makes it again
        local.rmdir()


PLACE_KEYS = ("cluster.fileroot", "experiment_name", "trial_name")


@contextlib.contextmanager
def _only_one(run_dir: RunDir) -> Iterator[None]:
    """Two launchers of one run directory take turns; the second then sees what the first has begun."""
    try:
        run_dir.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = (run_dir.root / ".launch.lock").open("w")
    except OSError as error:
        raise RunDirError(f"cluster.fileroot: {run_dir.root} cannot be written: {error.strerror}") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        except OSError as error:
            raise RunDirError(run_dir.unwritable(Path(error.filename or run_dir.root), error)) from error


def _refuse_existing(run_dir: RunDir) -> None:
    if read_state(run_dir) is None:
        return
    found = look(run_dir)
    other = "or give this one another name: trial_name=…"
    if found.alive:
        raise RunExistsError(
            f"{run_dir.root} is a run that is alive: `python -m launcher cancel {run_dir.root}`, {other}"
        )
    assert found.state is not None
    if found.state.attempt == 1 and found.state.error is not None and found.state.error.process == REFUSED:
        return  # nothing of it has run: the same command, mended, may go on under its name
    said = f"{found.state.phase}" if found.ended else "dead"
    raise RunExistsError(
        f"{run_dir.root} is a run already ({said}, step {found.state.step}):\n"
        f"  python -m launcher resume {run_dir.root}\n  goes on with it, {other}"
    )


def _await_last_processes(run_dir: RunDir) -> None:
    """After a kill -9 of its daemons, a run's processes may take a moment to end; two attempts must not overlap."""
    deadline = time.monotonic() + ENDING_SECS
    with processes_lock(run_dir).open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if time.monotonic() > deadline:
                    raise AliveError(f"processes of the last attempt of {run_dir.root} are still there") from None
                time.sleep(0.1)


def _write(run_dir: RunDir, config: Config, plan: Plan, state: State) -> Launch:
    logs = run_dir.logs / str(state.attempt)
    logs.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = config.dump_yaml()
    write_atomic(run_dir.config, text)
    write_atomic(logs / "config.yaml", text)
    write_atomic(run_dir.plan, plan.to_json())
    forget_jobs(run_dir)
    write_state(run_dir, state)
    beat(run_dir)
    return Launch(run_dir, plan, state.attempt, daemon_secs=config.deadlines.daemon, local=config.paths.local)
