"""The launcher's part of an attached run: shows it, passes signals on, and says how it ended.

Owns nothing of the run: its processes hang on a pipe that this process holds, so they end with it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.live import Live

from core.telemetry.metrics import read_metrics
from launcher.launch import Launch
from launcher.live import LiveView
from launcher.node.log_tail import tail
from launcher.node.specs import lead_node
from launcher.node.state import Phase, RunError, State, heartbeat_file, read_rendezvous, read_state, write_state
from launcher.run_dir import RunDir
from launcher.schedulers.base import Placement

LOOK_SECS = 0.2
LAST_SECS = 45.0
"""After the first daemon's end, how long the others may take before they are told to."""
LEADLESS_SECS = 5.0
"""The same once the lead daemon has ended: it has waited for those that answer."""
SAME_SECS = 1.0
"""A signal that comes again within this is the same one: `timeout` and a terminal reach a process twice."""
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Attendance:
    def __init__(self, launch: Launch, placement: Placement) -> None:
        self.launch = launch
        self.placement = placement
        self.signals = 0
        self._woken = threading.Event()
        self._lost: RunError | None = None

    def attend(self, *, quiet: bool) -> State:
        """Returns when every daemon has ended."""
        with self._signals(), self._view(quiet):
            self._wait()
        return self._closed_state()

    def _wait(self) -> None:
        told, first_end = 0, None
        silence = Silence(launch=self.launch)
        while True:
            exits = self.placement.exits()
            if all(code is not None for code in exits.values()):
                return
            if first_end is None and any(code is not None for code in exits.values()):
                first_end = time.monotonic()
            leads = exits[lead_node(self.launch.plan)] is None
            patience = (LAST_SECS if leads else LEADLESS_SECS) + LAST_SECS * told
            overdue = first_end is not None and time.monotonic() - first_end > patience
            if self.signals > told or overdue:
                told += 1
                self.placement.stop()
            if leads and self._lost is None and silence.too_long():
                self._end_silent(silence.error())
            self._woken.wait(LOOK_SECS)
            self._woken.clear()
            self._show()

    def _end_silent(self, error: RunError) -> None:
        """Nobody else ends a lead daemon that is stopped. Its guard wakes it, and kills it where that does not help."""
        self._lost = error
        print(f"{error.process}: {error.message}; ending every process of the run", file=sys.stderr, flush=True)
        self.placement.stop()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        counted: dict[int, float] = {}

        def seen(number: int, frame: FrameType | None) -> None:
            now = time.monotonic()
            if now - counted.get(number, -SAME_SECS) < SAME_SECS:
                return
            counted[number] = now
            self.signals += 1
            again = "again kills at once" if self.signals == 1 else "killing"
            os.write(2, f"\n{signal.Signals(number).name}: ending every process of the run ({again})\n".encode())
            self._woken.set()

        before = {number: signal.signal(number, seen) for number in STOPPING}
        try:
            yield
        finally:
            for number, action in before.items():
                signal.signal(number, action)

    @contextmanager
    def _view(self, quiet: bool) -> Iterator[None]:
        view = LiveView(self.launch.run_dir)
        view.skip_old()
        self._show = lambda: None
        if quiet:
            yield
        elif sys.stdout.isatty():
            console = Console()
            with Live(console=console, auto_refresh=False, transient=False) as live:
                self._show = lambda: live.update(view.renderable(self._status()), refresh=True)
                yield
                self._show()
        else:
            self._show = lambda: _print_lines(view)
            yield
            self._show()

    def _status(self) -> dict[str, object]:
        state = read_state(self.launch.run_dir)
        return json.loads(json.dumps(dataclasses.asdict(state))) if state else {}

    def _closed_state(self) -> State:
        """The state the run ended with. A lead daemon that was killed could not write it: then we do."""
        run_dir = self.launch.run_dir
        state = read_state(run_dir)
        if state is not None and state.phase.final and (self._lost is None or self.signals):
            return state
        state = state or State(Phase.FAILED, self.launch.attempt)
        state = dataclasses.replace(state, step=max(state.step, read_metrics(run_dir.metrics).last_step))
        error = state.error or self._lost or _daemon_error(self.launch, self.placement.exits())
        phase = Phase.CANCELLED if self.signals else Phase.FAILED
        ended = dataclasses.replace(state, phase=phase, error=error)
        try:
            return write_state(run_dir, ended)
        except OSError as wrong:
            said = RunError("run directory", run_dir.unwritable(run_dir.state, wrong), for_good=True)
            return dataclasses.replace(ended, error=said)


class Silence:
    """How long the lead daemon's heartbeat has stood still, once it has said where it is.

    Counted in looks, not by the clock: a launcher that was itself stopped has seen nothing meanwhile.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._beat = 0
        self._looks = 0

    def too_long(self) -> bool:
        found = read_rendezvous(self._launch.run_dir, self._launch.attempt)
        try:
            beat = heartbeat_file(self._launch.run_dir).stat().st_mtime_ns
        except OSError:  # the daemon sees that too, and ends
            return False
        self._looks = self._looks + 1 if found is not None and beat == self._beat else 0
        self._beat = beat
        return self._looks * LOOK_SECS > self._launch.daemon_secs

    def error(self) -> RunError:
        node = lead_node(self._launch.plan)
        partition, _, index = node.rpartition("-")
        log = self._launch.run_dir.log_file(self._launch.attempt, partition, int(index), "daemon")
        how = f"no heartbeat for {self._launch.daemon_secs:g} s (deadlines.daemon): it is stopped, or hangs"
        return RunError(f"daemon of {node}", how, log=str(log))


def _daemon_error(launch: Launch, exits: object) -> RunError | None:
    assert isinstance(exits, dict)
    for node, code in exits.items():
        if code:
            partition, _, index = node.rpartition("-")
            log = launch.run_dir.log_file(launch.attempt, partition, int(index), "daemon")
            how = f"was ended by {signal.Signals(code - 128).name}" if code > 128 else f"ended with status {code}"
            return RunError(f"daemon of {node}", how, "\n".join(tail(log)), str(log))
    return None


def _print_lines(view: LiveView) -> None:
    for line in view.new_lines():
        print(line, flush=True)


def ending_text(run_dir: RunDir, state: State) -> str:
    """What a person reads at the end: how it ended and, when it failed, of what and how to go on."""
    name = run_dir.root
    if state.phase is Phase.DONE:
        return f"done: step {state.step}, {name}"
    when = f"after step {state.step}" if state.step else "before its first step was done"
    lines = [f"{state.phase} {when}: {name}"]
    if state.error is not None:
        lines += error_lines(state.error)
    lines.append(f"  {go_on(state)}: python -m launcher resume {name}")
    return "\n".join(lines)


def go_on(state: State) -> str:
    for_good = state.error is not None and state.error.for_good
    return "going on would end the same way; once that is mended" if for_good else "go on with"


def error_lines(error: RunError) -> list[str]:
    lines = [f"  {error.process}: {error.message}"]
    lines += [f"    | {line}" for line in error.traceback.splitlines()[-15:]]
    if error.log:
        lines.append(f"  log: {error.log}")
    return lines
