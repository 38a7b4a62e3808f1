"""The ranks of one node: they start together in a generation, and when one dies the others are ended with it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

from launcher.node.book import RanksReport
from launcher.node.children import Child, ChildState, Exit
from launcher.node.crew import run_error
from launcher.node.log_tail import last_error
from launcher.node.specs import Spec
from launcher.node.state import RunError

GATHER_SECS = 0.5
"""After the first death, how long to wait for others: the one that was first to die is not always first to be seen."""


class RankGroup:
    def __init__(
        self,
        specs: Callable[[int], list[Spec]],
        on_report: Callable[[RanksReport], None],
        say: Callable[[str], None],
    ) -> None:
        self.generation = -1
        self.children: dict[str, Child] = {}
        self.ending = False
        self._specs = specs
        self._on_report = on_report
        self._say = say
        self._dead: list[tuple[Child, Exit]] = []
        self._turn: asyncio.Task[None] | None = None

    def follow(self, generation: int) -> None:
        """Starts the ranks of this generation, once those of the last one are gone."""
        if generation > self.generation and not self.ending and (self._turn is None or self._turn.done()):
            self._turn = asyncio.create_task(self._start(generation))

    async def stop(self) -> None:
        self.ending = True
        for child in self.children.values():
            child.stop()
        await asyncio.gather(*(child.gone() for child in self.children.values()))

    async def yield_up(self, seconds: float) -> None:
        """The cluster wants the node: they may save their last completed step, for so long."""
        self.ending = True
        for child in self.children.values():
            child.pass_on(signal.SIGUSR2)
        waiting = [asyncio.create_task(child.gone()) for child in self.children.values()]
        if waiting:
            await asyncio.wait(waiting, timeout=seconds)

    async def _start(self, generation: int) -> None:
        for child in self.children.values():
            child.kill()
        await asyncio.gather(*(child.gone() for child in self.children.values()))
        if self.ending:
            return
        self.generation = generation
        self._dead = []
        self.children = {spec.name: Child(spec, self._exited) for spec in self._specs(generation)}
        if not self.children:
            return
        self._say(f"ranks start, generation {generation}")
        for child in self.children.values():
            child.start()
        self._on_report(RanksReport(generation, "running"))

    def _exited(self, child: Child, ended: Exit) -> None:
        child.move(ChildState.ENDED)
        if ended.asked or self.ending:
            return
        if ended.code != 0:
            self._dead.append((child, ended))
            if len(self._dead) == 1:
                asyncio.get_running_loop().call_later(GATHER_SECS, self._report_death, self.generation)
        elif all(each.state is ChildState.ENDED for each in self.children.values()) and not self._dead:
            self._on_report(RanksReport(self.generation, "done"))

    def _report_death(self, generation: int) -> None:
        if generation != self.generation or self.ending:
            return
        error = self._first_cause()
        self._say(f"{error.process} died: {error.message}")
        for child in self.children.values():
            if child.state is not ChildState.ENDED:
                child.kill()
        self._on_report(RanksReport(generation, "died", error))

    def _first_cause(self) -> RunError:
        """Of the ranks that died, the first whose error does not look like the consequence of another's death."""
        for child, ended in self._dead:
            if not last_error(child.spec.log, offset=ended.log_offset).may_follow_another:
                return run_error(child, ended)
        return run_error(*self._dead[0])
