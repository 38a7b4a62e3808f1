"""The node daemon: starts the children of its node, answers for them, and tears them down.

Owns its node. On the lead node it also hosts the registry's store and, through launcher.node.lead, judges the run.
A lost store, a signal, POST /stop or the run's ending in the registry all lead to the same teardown.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import platform
import signal
import socket
import sys
import time
import traceback
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from core.config.deadlines import Deadlines
from core.rpc.service import bound_socket
from core.telemetry.phases import announce, open_phases
from launcher.node import agreed, guard, local_dir, orphan
from launcher.node import book as entries
from launcher.node.api import open_api
from launcher.node.book import Ending, RanksReport, ServerEntry
from launcher.node.children import Child, ChildState
from launcher.node.crew import Crew
from launcher.node.fetches import Fetches
from launcher.node.lead import Lead, lost_daemon
from launcher.node.ledger import Ledger
from launcher.node.parts import Parts
from launcher.node.rank_group import RankGroup
from launcher.node.specs import Kind, NodeContext, lead_node, rank_specs, server_specs, service_specs
from launcher.node.state import Phase, Rendezvous, RunError, State, read_rendezvous, read_state, write_rendezvous
from launcher.roles.arguments import PHASES

STACK_SECS = 1.0
FAREWELL_SECS = 5.0
OPENING_SECS = 60.0
EXIT_STATUS = {Phase.DONE: 0, Phase.FAILED: 1, Phase.CANCELLED: 130, Phase.PREEMPTED: 85}
"""85: stopped by the cluster; launcher.slurm.batch then asks for one requeue."""


@dataclass(frozen=True)
class Settings:
    """What a daemon needs of the configuration."""

    retries: int = 0
    watchdog_secs: float = 600.0
    deadlines: Deadlines = field(default_factory=Deadlines)
    verify: Any = "full"
    visible_secs: float = 90.0
    setup_secs: float = 300.0
    """From a daemon's own start until the others must be there (rollout.setup_timeout)."""
    preempted_secs: float = 60.0
    """What the cluster's warning leaves for a last checkpoint."""


class Daemon:
    def __init__(self, context: NodeContext, settings: Settings) -> None:
        self.context = context
        self.settings = settings
        self.token = context.run_dir.read_token()
        self.ending: Ending | None = None
        self.lead: Lead | None = None
        self.orphaned = False
        self.ledger = Ledger(context.plan, context.name, self._read, self._store_lost)
        self.parts = Parts(context.planned.servers, self.ledger.put)
        shared = agreed.agreed(context.local) if self.parts else None
        self.fetches = Fetches(context.run_dir.weights, context.local, settings.verify, settings.visible_secs, shared)
        self.crew = Crew([], self._child_changed, self.say)
        self.ranks = RankGroup(lambda generation: [], self._ranks_changed, self.say)
        self._service = open_api(self)
        self._ended = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._opening: asyncio.Task[None] | None = None
        self._held = -1
        """Open as long as the daemon lives: its node-local directory is in use."""

    @property
    def children(self) -> list[Child]:
        return [*self.crew.children.values(), *self.ranks.children.values()]

    def end(self, ending: Ending) -> None:
        """The first reason to end is the one that counts."""
        if self.ending is None:
            self.ending = ending
            self.say(f"ending: {ending.phase}" + (f", {ending.error.message}" if ending.error else ""))
            self._ended.set()

    def fail(self, message: str) -> None:
        log = self.context.run_dir.log_file(self.context.attempt, self.context.partition, self.context.node, "daemon")
        self.end(Ending(Phase.FAILED, RunError(f"daemon of {self.context.name}", message, log=str(log))))

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a log on a full disk
            sys.stderr.write(f"{time.strftime('%H:%M:%S')} daemon of {self.context.name}: {text}\n")
            sys.stderr.flush()

    # --- from start to end

    async def run(self) -> int:
        guard.become_subreaper()
        for number in (signal.SIGTERM, signal.SIGINT, *([signal.SIGUSR2] if self.context.on_cluster else [])):
            asyncio.get_running_loop().add_signal_handler(number, self._asked_to_end, number)
        try:
            self._held = local_dir.make(self.context.local)
            open_phases(self.context.local / PHASES, f"daemon-{self.context.name}")
            url = await self._service.start(self.context.host)
            self.context = dataclasses.replace(self.context, daemon=url)
            await self._start(url)
            await self._ended.wait()
        except OSError as error:  # a directory that cannot be made: it says itself which and why
            self.fail(str(error))
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            await self._tear_down()
        assert self.ending is not None
        return orphan.STATUS if self.orphaned else EXIT_STATUS[self.ending.phase]

    async def _start(self, url: str) -> None:
        self.ledger.put(*entries.daemon(self.context.name, url, platform.node()))
        listener = self._lead_the_run(url) if self.context.name == lead_node(self.context.plan) else None
        specs = [*service_specs(self.context), *server_specs(self.context)]
        self.crew = Crew(specs, self._child_changed, self.say)
        self.crew.start()
        if self.lead is None:
            await self._find_the_lead()
        self.ranks = RankGroup(
            lambda generation: rank_specs(self.context, generation),
            self._ranks_changed,
            self.say,
            self.context.local / PHASES,
            self.settings.deadlines.of,
        )
        self._watch(self.ranks.keep_judging())
        if self.lead is not None:
            self.ranks.follow(self.lead.state.generation)
            self.lead.record(phase=Phase.RUNNING)
        if self.ending is None:
            self._opening = self._watch(self.ledger.open(self.context.store, listener))
            self._watch(self.ledger.keep_listening(self.settings.deadlines.daemon, self.settings.setup_secs))

    def _lead_the_run(self, url: str) -> socket.socket:
        """The store's socket is bound here and now: ranks may connect to it before the store itself is up."""
        listener = bound_socket(self.context.host)
        listener.setblocking(True)
        store = f"{self.context.host}:{listener.getsockname()[1]}"
        context = self.context = dataclasses.replace(self.context, store=store)
        before = read_state(context.run_dir) or State(Phase.STARTING, context.attempt, launched=time.time())
        self.lead = Lead(
            context,
            dataclasses.replace(before, attempt=context.attempt, phase=Phase.STARTING, error=None),
            token=self.token,
            retries=self.settings.retries,
            watchdog_secs=self.settings.watchdog_secs,
            setup_secs=self.settings.setup_secs,
            service_secs=self.settings.deadlines.service,
            daemon_secs=self.settings.deadlines.daemon,
            restart=lambda name, why: self.crew.restart(name, why, at_once=True),
            end=self.end,
            raise_generation=self._raise_generation,
            children=lambda: {child.name: child.state for child in self.children},
            say=self.say,
        )
        self.ledger.write(entries.GENERATION, str(before.generation))
        here = Rendezvous(url, store, context.host, context.attempt, os.getpid(), time.time())
        write_rendezvous(context.run_dir, here)
        self._watch(self.lead.keep_beating())
        self._watch(self.lead.keep_asking(lambda: self.ledger.book))
        return listener

    def _watch(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs beside everything else; its error is the daemon's."""

        def done(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                traceback.print_exception(error)
                self.fail(f"{type(error).__name__}: {error}")

        task = asyncio.create_task(work)
        task.add_done_callback(done)
        self._tasks.append(task)
        return task

    async def _find_the_lead(self) -> None:
        limit = self.settings.setup_secs
        deadline = time.monotonic() + limit
        while self.ending is None:
            found = read_rendezvous(self.context.run_dir, self.context.attempt)
            if found is not None:
                self.context = dataclasses.replace(self.context, store=found.store)
                return
            if time.monotonic() > deadline:
                attempt, path = self.context.attempt, self.context.run_dir.rendezvous
                self.fail(f"no {path} of attempt {attempt} within {limit:.0f} s: the lead daemon is missing")
            await asyncio.sleep(0.1)

    # --- what happens meanwhile

    def registered(self, name: str, url: str) -> None:
        """A child says where it answers. The service of rank 0 is the trainer's."""
        announce("registering")
        rank = self.ranks.children.get("rank-0" if name == "trainer" else name)
        if name in self.crew.children:
            self.crew.registered(name, url)
        elif rank is None:
            self.say(f"{name} at {url} registered, but is no child of this node")
        else:
            rank.registered(url)
            if rank.name == "rank-0":
                self.ledger.put(*entries.address("service", "trainer", url))

    def _read(self) -> None:
        book = self.ledger.book
        if book.ending is not None:
            self.end(book.ending)
        if self.ending is not None:
            return
        if book.generation is not None:
            self.ranks.follow(book.generation)
        if self.lead is not None:
            self.lead.judge(book)

    def _store_lost(self, why: str) -> None:
        """Its host, the lead daemon, is gone, or cannot be reached from here."""
        lead = lead_node(self.context.plan)
        self.orphaned = self.lead is None and self.ending is None
        self.say(f"the registry at {self.context.store} is lost ({why})")
        error = lost_daemon(self.context, lead, f"its registry is lost ({why})", self.ledger.book.machine(lead))
        self.end(Ending(Phase.FAILED, error))

    def _asked_to_end(self, number: int) -> None:
        self.say(f"got {signal.Signals(number).name}")
        self.end(Ending(Phase.PREEMPTED if self.context.on_cluster else Phase.CANCELLED))

    def _raise_generation(self, generation: int) -> None:
        self.ledger.put("service/trainer", "")
        self.ledger.write(entries.GENERATION, str(generation), expected=str(generation - 1))

    def _ranks_changed(self, report: RanksReport) -> None:
        self.ledger.put(*entries.ranks(self.context.name, report))

    def _child_changed(self, child: Child, error: RunError | None) -> None:
        up = child.state is ChildState.UP
        if child.spec.kind is Kind.SERVICE:
            self.ledger.put(f"service/{child.name}", entries.address("service", child.name, child.url)[1] if up else "")
            if error is not None:
                self.end(Ending(Phase.FAILED, error))
            return
        if self.parts.changed(child.name, child.state, error):
            return
        partition = self.context.plan.partition(self.context.partition)
        assert partition is not None
        state = "out" if child.state is ChildState.OUT else "up" if up else "down"
        url = child.url if up else ""
        entry = ServerEntry(child.name, url, partition.backend, self.context.daemon, state, child.started, error)
        self.ledger.put(*entries.server(entry))

    # --- the end

    async def _tear_down(self) -> None:
        assert self.ending is not None
        if self.lead is not None:
            self.lead.record(phase=Phase.STOPPING, error=self.ending.error)
            self.ledger.write(entries.PHASE, self.ending.text())
        if self.ending.error is not None and self.ending.error.process == "watchdog":
            for child in self.children:
                child.pass_on(signal.SIGUSR1)
            await asyncio.sleep(STACK_SECS)
        if self.ending.phase is Phase.PREEMPTED:  # the services stay until the ranks have saved what they can
            await self.ranks.yield_up(self.settings.preempted_secs)
        mourning = orphan.write_for_the_lead(self.context, self.ending) if self.orphaned else asyncio.sleep(0)
        await asyncio.gather(self.crew.stop(), self.ranks.stop(), mourning)
        await self._part(self.ending)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        local_dir.remove(self.context.local)
        if self.lead is not None:
            await self.lead.close()
            self.lead.record(phase=self.ending.phase)
        await self._service.stop()

    async def _part(self, ending: Ending) -> None:
        """The lead's store outlives the other daemons, so that they end by the run's ending and not by a lost store."""
        if self._opening is not None:  # it cannot be interrupted anyway: torch is being imported
            await asyncio.wait([self._opening], timeout=OPENING_SECS)
        if self.lead is None:
            why = ending.error.message if ending.error else ending.phase
            await self.ledger.close(f"bye/{self.context.name}", why)
        else:
            others = [name for name in entries.node_names(self.context.plan) if name != self.context.name]
            deadline = time.monotonic() + self.context.grace + FAREWELL_SECS
            while time.monotonic() < deadline and self.ledger.connected:
                if all(self._has_left(name) for name in others):
                    break
                await asyncio.sleep(0.05)
            await self.ledger.close()

    def _has_left(self, node: str) -> bool:
        book = self.ledger.book
        silent = book.daemon(node) is not None and book.beat_ages.get(node, 0.0) > FAREWELL_SECS
        return silent or book.bye(node) is not None
