"""The services and servers of one node: started, registered, restarted with back-off, given up when they flap.

Ranks are not among them (launcher.node.rank_group): they live and die together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from launcher.node.children import Child, ChildState, Exit
from launcher.node.log_tail import last_error
from launcher.node.restarts import Restarts
from launcher.node.specs import CANNOT_GO_ON, Spec
from launcher.node.state import RunError


class Crew:
    """`on_change(child, error)` is called at every registration, death and giving up (error: only then)."""

    def __init__(
        self, specs: Iterable[Spec], on_change: Callable[[Child, RunError | None], None], say: Callable[[str], None]
    ) -> None:
        self.children = {spec.name: Child(spec, self._exited) for spec in specs}
        self.restarts = {name: Restarts() for name in self.children}
        self.ending = False
        self._on_change = on_change
        self._say = say

    def start(self) -> None:
        for child in self.children.values():
            child.start()

    def registered(self, name: str, url: str) -> None:
        child = self.children[name]
        child.registered(url)
        self._on_change(child, None)

    def restart(self, name: str, why: str = "on request", *, at_once: bool = False) -> None:
        """Somebody saw that it is stuck: it is ended (its death counts), and starts again as after any death."""
        child = self.children[name]
        if child.state in (ChildState.STARTING, ChildState.UP):
            self._say(f"{name} is restarted: {why}")
            if at_once:
                child.kill()
            else:
                child.stop()
            self._on_change(child, None)

    async def stop(self) -> None:
        self.ending = True
        for child in self.children.values():
            if child.state not in (ChildState.ENDED, ChildState.OUT):
                child.stop()
        await asyncio.gather(*(child.gone() for child in self.children.values()))

    def _exited(self, child: Child, ended: Exit) -> None:
        if self.ending:
            child.move(ChildState.ENDED)
            return
        pause = self.restarts[child.name].pause_after(ended.lived_secs)
        if pause is None or ended.code == CANNOT_GO_ON:
            child.move(ChildState.OUT)
            times = "" if ended.code == CANNOT_GO_ON else f"died {self.restarts[child.name].deaths} times in a row, "
            error = run_error(child, ended, times)
            self._say(f"{child.name} is left out: {error.message}")
            self._on_change(child, error)
            return
        child.move(ChildState.WAITING)
        self._say(f"{child.name} died ({run_error(child, ended).message}), starts again in {pause:g} s")
        self._on_change(child, None)
        asyncio.get_running_loop().call_later(pause, self._start_again, child)

    def _start_again(self, child: Child) -> None:
        if not self.ending and child.state is ChildState.WAITING:
            child.start()


def run_error(child: Child, ended: Exit, before: str = "") -> RunError:
    """What a dead child's log says about its death."""
    found = last_error(child.spec.log, offset=ended.log_offset)
    message = f"{before}{ended.reason}" + (f": {found.message}" if found.message else "")
    return RunError(child.name, message, found.traceback, str(child.spec.log), ended.code == CANNOT_GO_ON)
