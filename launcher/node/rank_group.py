"""The ranks of one node: they start together in a generation, and when one dies the others are ended with it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from core.telemetry.phases import Announced, read_announced
from launcher.node.book import RanksReport
from launcher.node.children import Child, ChildState, Exit
from launcher.node.crew import run_error
from launcher.node.log_tail import last_error, tail
from launcher.node.specs import CANNOT_GO_ON, Spec
from launcher.node.state import RunError
from launcher.node.stuck import Stuck, find_stuck, wake

LOOK_SECS = 0.5
STACK_SECS = 1.0
STACK_LINES = 200
GATHER_SECS = 0.5
"""After the first death, how long to wait for others: the one that was first to die is not always first to be seen."""


class RankGroup:
    def __init__(
        self,
        specs: Callable[[int], list[Spec]],
        on_report: Callable[[RanksReport], None],
        say: Callable[[str], None],
        phases: Path | None = None,
        deadline_of: Callable[[str], float] = lambda phase: float("inf"),
    ) -> None:
        self.generation = -1
        self._phases = phases
        self._deadline_of = deadline_of
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

    def announced(self) -> dict[str, Announced]:
        """What each living rank last said that it does."""
        found = {}
        for child in self.children.values():
            said = read_announced(self._phases, child.name) if self._phases is not None else None
            if said is not None and child.state in (ChildState.STARTING, ChildState.UP):
                found[child.name] = said
        return found

    async def keep_judging(self) -> None:
        """Until cancelled: ranks that are stuck show their stacks and are ended, as if one had died."""
        while True:
            await asyncio.sleep(LOOK_SECS)
            said = self.announced()
            self._note_working(said)
            complete = len(said) == len(self.children) and not self.ending and not self._dead
            stuck = find_stuck(said, self._deadline_of) if complete else None
            if stuck is not None:
                await self._end_stuck(stuck, said)

    def _note_working(self, said: dict[str, Announced]) -> None:
        """Rank 0 registers where it answers; the others answer nobody, and are up once they do something."""
        for name, announced in said.items():
            child = self.children[name]
            if child.state is ChildState.STARTING and name != "rank-0" and announced.phase != "starting":
                child.registered("")

    async def _end_stuck(self, stuck: Stuck, said: dict[str, Announced]) -> None:
        generation, child = self.generation, self.children[stuck.name]
        self._say(f"{stuck.message}; the stacks of all ranks are in their logs")
        before = child.spec.log.stat().st_size
        for each in self.children.values():
            each.pass_on(signal.SIGUSR1)
        await asyncio.sleep(STACK_SECS / 2)
        for announced in said.values():
            wake(announced.pid)
        await asyncio.sleep(STACK_SECS / 2)
        stack = "\n".join(tail(child.spec.log, offset=before, lines=STACK_LINES))
        if generation != self.generation or self.ending or self._dead:
            return
        for each in self.children.values():
            if each.state is not ChildState.ENDED:
                each.kill()
        await asyncio.gather(*(each.gone() for each in self.children.values()))
        self._on_report(
            RanksReport(generation, "died", RunError(stuck.name, stuck.message, stack, str(child.spec.log)))
        )

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
        for name in self.children if self._phases is not None else ():
            (self._phases / f"{name}.phase").unlink(missing_ok=True)  # type: ignore[operator]
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
        for_good = any(ended.code == CANNOT_GO_ON for _, ended in self._dead)
        self._on_report(RanksReport(generation, "failed" if for_good else "died", error))

    def _first_cause(self) -> RunError:
        """Of the ranks that died, the first whose error does not look like the consequence of another's death."""
        for child, ended in self._dead:
            if not last_error(child.spec.log, offset=ended.log_offset).may_follow_another:
                return run_error(child, ended)
        return run_error(*self._dead[0])
