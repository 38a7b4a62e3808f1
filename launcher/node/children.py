"""One child of a node daemon: a process under its guard, and the states it may be in.

Owns the process and its state; whether a dead child is started again is decided by who owns the child.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from launcher.node import guard
from launcher.node.specs import REPOSITORY, Spec

GUARD = Path(guard.__file__)


class ChildState(StrEnum):
    WAITING = "waiting"  # not started yet, or dead and to be started again
    STARTING = "starting"  # its process runs, it has not registered
    UP = "up"  # registered (a rank other than 0: works)
    STOPPING = "stopping"  # told to end
    ENDED = "ended"  # ended and not started again
    OUT = "out"  # given up: it flaps


MOVES = {
    ChildState.WAITING: {ChildState.STARTING, ChildState.ENDED, ChildState.OUT},
    ChildState.STARTING: {ChildState.UP, ChildState.STOPPING, ChildState.WAITING, ChildState.ENDED, ChildState.OUT},
    ChildState.UP: {ChildState.UP, ChildState.STOPPING, ChildState.WAITING, ChildState.ENDED, ChildState.OUT},
    ChildState.STOPPING: {ChildState.STOPPING, ChildState.WAITING, ChildState.ENDED, ChildState.OUT},
    ChildState.ENDED: set(),
    ChildState.OUT: set(),
}


class IllegalMoveError(Exception):
    def __init__(self, name: str, old: ChildState, new: ChildState) -> None:
        super().__init__(f"{name} cannot go from {old} to {new}")


@dataclass(frozen=True)
class Exit:
    """How a child's process ended. `asked`: it had been told to."""

    code: int
    asked: bool
    lived_secs: float
    log_offset: int

    @property
    def reason(self) -> str:
        if self.code > 128:
            with contextlib.suppress(ValueError):
                return f"ended by {signal.Signals(self.code - 128).name}"
        if self.code < 0:
            return f"its guard was ended by {signal.Signals(-self.code).name}"
        return f"exit status {self.code}"


class Child:
    """Belongs to the event loop that starts it."""

    def __init__(self, spec: Spec, on_exit: Callable[[Child, Exit], None]) -> None:
        self.spec = spec
        self.state = ChildState.WAITING
        self.url = ""
        self.started = 0.0
        self.starts = 0
        self._on_exit = on_exit
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._begun = 0.0
        self._log_offset = 0
        self._gone = asyncio.Event()
        self._gone.set()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int | None:
        """Of its guard."""
        return self._process.pid if self._process else None

    def move(self, new: ChildState) -> None:
        if new not in MOVES[self.state]:
            raise IllegalMoveError(self.name, self.state, new)
        self.state = new

    def start(self) -> None:
        self.move(ChildState.STARTING)
        self.starts += 1
        self.started, self._begun = time.time(), time.monotonic()
        words = [sys.executable, "-S", "-E", "-P", str(GUARD)]
        words += ["--grace", str(self.spec.grace), "--scratch", self.spec.scratch, "--"]
        with self.spec.log.open("ab") as log:
            if self.starts > 1:
                log.write(f"=== start {self.starts}, {time.strftime('%Y-%m-%d %H:%M:%S')} ===\n".encode())
            self._log_offset = log.tell()
            self._process = subprocess.Popen(
                [*words, *self.spec.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment(self.spec),
                start_new_session=True,
                pass_fds=self.spec.keep_open,
            )
        self._gone.clear()
        self._pidfd = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    def registered(self, url: str) -> None:
        self.url = url
        if self.state is not ChildState.STOPPING:
            self.move(ChildState.UP)

    def stop(self) -> None:
        """TERM, after the grace KILL (the guard sees to it)."""
        if self._process is not None:
            self.move(ChildState.STOPPING)
            self._process.send_signal(signal.SIGTERM)
        elif self.state is ChildState.WAITING:
            self.move(ChildState.ENDED)

    def kill(self) -> None:
        """The whole tree, at once: a second TERM tells the guard to."""
        if self._process is not None:
            self.move(ChildState.STOPPING)
            self._process.send_signal(signal.SIGTERM)
            asyncio.get_running_loop().call_later(0.05, self._term_again, self._process)

    def pass_on(self, number: signal.Signals) -> None:
        """SIGUSR1 or SIGUSR2 for the command itself."""
        if self._process is not None:
            self._process.send_signal(number)

    async def gone(self) -> None:
        await self._gone.wait()

    def _term_again(self, process: subprocess.Popen[bytes]) -> None:
        if self._process is process:
            process.send_signal(signal.SIGTERM)

    def _exited(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is None:
            return
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process = None
        self.url = ""
        asked = self.state is ChildState.STOPPING
        if code < 0:
            end_strays()
        self._gone.set()
        self._on_exit(self, Exit(code, asked, time.monotonic() - self._begun, self._log_offset))


def environment(spec: Spec) -> dict[str, str]:
    """The daemon's environment with the child's on top; our code comes first on PYTHONPATH."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC_")}
    merged = {**inherited, **spec.env}
    paths = [str(REPOSITORY), *(each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each)]
    merged["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return merged


def end_strays() -> None:
    """A guard was killed: what it left behind has become our own child, and is no guard."""
    while strays := [pid for pid, parent in guard.parents().items() if parent == os.getpid() and not _is_guard(pid)]:
        for pid in strays:
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(pid)
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                os.close(handle)
                os.waitpid(pid, 0)  # its own children are ours now, and seen in the next round


def _is_guard(pid: int) -> bool:
    try:
        return str(GUARD).encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return True
