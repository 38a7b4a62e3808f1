"""What the lead daemon does besides looking after its node: state file, heartbeat, watchdog and verdict.

Owns judging the whole run from the registry's book; it touches no process.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core.rpc.client import AsyncClient
from core.rpc.errors import RpcError
from core.telemetry.metrics import read_metrics
from launcher.node.book import SERVICES, Book, Ending, node_names
from launcher.node.specs import NodeContext, lead_node
from launcher.node.state import BEAT_SECS, Phase, RunError, State, beat, heartbeat_file, write_state
from launcher.node.watchdog import Watchdog, report

POLL_SECS = 1.0
QUIET_SECS = 4.0
"""A beat older than this has its daemon asked; a refused connection means it is dead."""
STATE_SECS = 10.0
UNWRITTEN_SECS = 5.0
"""For so long the run directory may take no writing before the run ends."""


class Lead:
    def __init__(
        self,
        context: NodeContext,
        state: State,
        *,
        token: str,
        retries: int,
        watchdog_secs: float,
        setup_secs: float = 300.0,
        service_secs: float,
        daemon_secs: float,
        restart: Callable[[str, str], None],
        end: Callable[[Ending], None],
        raise_generation: Callable[[int], None],
        children: Callable[[], dict[str, str]],
        say: Callable[[str], None],
    ) -> None:
        self.context = context
        self.state = state
        self.retries = retries
        self.setup_secs = setup_secs
        self.rank_deaths = 0
        self.statuses: dict[str, Any] = {}
        self._token = token
        self._service_secs = service_secs
        self._daemon_secs = daemon_secs
        self._restart = restart
        self._heard: dict[str, tuple[str, float]] = {}
        self._end = end
        self._raise_generation = raise_generation
        self._children = children
        self._say = say
        self._others = [name for name in node_names(context.plan) if name != lead_node(context.plan)]
        self._training = [name for name in node_names(context.plan) if name.startswith("training-")]
        self._watchdog = Watchdog(watchdog_secs, time.monotonic())
        self._began = time.monotonic()
        self._clients: dict[str, AsyncClient] = {}
        self._written = 0.0
        self._unwritten: dict[Path, float] = {}
        self._probing: set[str] = set()
        self._probes: set[asyncio.Task[None]] = set()

    # --- the record

    def record(self, **changes: Any) -> None:
        """Changes of the state are written at once, its time stamp every few seconds. It never raises OSError."""
        changed = dataclasses.replace(self.state, **changes)
        if changed.phase.final:
            # asked once a second, the trainer may have ended before it could tell of its last steps
            with contextlib.suppress(OSError):
                last = read_metrics(self.context.run_dir.metrics).last_step
                changed = dataclasses.replace(changed, step=max(changed.step, last))
        if changed.error is not None:
            changed = dataclasses.replace(changed, error=self._explained(changed.error))
        if changed != self.state or time.monotonic() - self._written > STATE_SECS:
            self._written, self.state = time.monotonic(), changed
            try:
                self.state = write_state(self.context.run_dir, changed)
            except OSError as error:
                self._written = 0.0
                self._not_written(self.context.run_dir.state, error)
            else:
                self._unwritten.pop(self.context.run_dir.state, None)

    async def keep_beating(self) -> None:
        file = heartbeat_file(self.context.run_dir)
        while True:
            try:
                beat(self.context.run_dir)
            except OSError as error:
                self._not_written(file, error)
            else:
                self._unwritten.pop(file, None)
            await asyncio.sleep(BEAT_SECS)

    def _explained(self, error: RunError) -> RunError:
        """Of a full disk a process dies without a word: its log cannot be written either."""
        hint = self.context.run_dir.ailment()
        if not hint or error.for_good:
            return error
        return dataclasses.replace(error, message=f"{error.message}; {hint}", for_good=True)

    def _not_written(self, path: Path, error: OSError) -> None:
        """Storage may be away for a moment; then the run ends, for nobody could go on from it."""
        since = self._unwritten.setdefault(path, time.monotonic())
        if time.monotonic() - since >= UNWRITTEN_SECS:
            text = self.context.run_dir.unwritable(path, error)
            self._end(Ending(Phase.FAILED, RunError("run directory", text, for_good=True)))

    # --- the services

    async def keep_asking(self, book: Callable[[], Book]) -> None:
        """Asks every service for its counters; ends the run when none of them moves."""
        while True:
            urls = {name: book().service(name) for name in SERVICES}
            found = await asyncio.gather(*(self._ask(name, url) for name, url in urls.items() if url))
            self.statuses = dict(found)
            self._judge_services({name: url for name, url in urls.items() if url})
            trainer = self.statuses.get("trainer")
            if isinstance(trainer, dict) and isinstance(trainer.get("step"), int):
                self.record(step=trainer["step"])
            self.record()
            if self._training:
                self._watch()
            await asyncio.sleep(POLL_SECS)

    async def _ask(self, name: str, url: str) -> tuple[str, Any]:
        client = self._clients.get(url)
        if client is None:
            client = self._clients[url] = AsyncClient(url, self._token, timeout=5.0)
        try:
            return name, await client.get("/status")
        except RpcError as error:
            return name, f"does not answer: {error.message}"

    def _judge_services(self, urls: dict[str, str]) -> None:
        """One that was reached and has not answered for too long is stuck or cut off: it starts again."""
        now = time.monotonic()
        for name, url in urls.items():
            known, heard = self._heard.get(name, ("", now))
            if isinstance(self.statuses.get(name), dict) or known != url:
                self._heard[name] = url, now
            elif now - heard > self._service_secs and name != "trainer":
                self._heard[name] = url, now
                self._restart(name, f"it did not answer for {now - heard:.0f} s ({self.statuses.get(name)})")

    def _watch(self) -> None:
        moving = {**self.statuses, "generation": self.state.generation, "children": self._children()}
        still = self._watchdog.stuck_for(moving, time.monotonic())
        if still is None or self.state.phase is not Phase.RUNNING:
            return
        text = report(self.statuses, self._children(), still)
        self._say(text)
        first = text.splitlines()[0]
        log = str(
            self.context.run_dir.log_file(self.context.attempt, self.context.partition, self.context.node, "daemon")
        )
        self._end(Ending(Phase.FAILED, RunError("watchdog", first, text, log)))

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()

    # --- the verdict

    def judge(self, book: Book) -> None:
        """What follows from the book as it stands."""
        self._judge_ranks(book)
        self._judge_servers(book)
        for node in self._others:
            self._judge_daemon(book, node)

    def _judge_ranks(self, book: Book) -> None:
        reports = [book.ranks(node) for node in self._training]
        current = [each for each in reports if each is not None and each.generation == self.state.generation]
        died = next((each for each in current if each.state in ("died", "failed")), None)
        if died is not None and died.state == "failed":
            self._end(Ending(Phase.FAILED, died.error))
        elif died is not None:
            self.rank_deaths += 1
            if self.rank_deaths > self.retries:
                self._end(Ending(Phase.FAILED, died.error))
            else:
                self._say(f"ranks are restarted ({self.rank_deaths} of at most {self.retries} times)")
                self.record(generation=self.state.generation + 1)
                self._raise_generation(self.state.generation)
        elif reports and len(current) == len(reports) and all(each.state == "done" for each in current):
            self._end(Ending(Phase.DONE))

    def _judge_servers(self, book: Book) -> None:
        planned = sum(
            server.part == 0
            for each in self.context.plan.partitions
            for node in each.nodes
            if each.name == "inference"
            for server in node.servers
        )
        out = [entry for entry in book.servers() if entry.state == "out"]
        if planned and len(out) == planned:
            self._end(Ending(Phase.FAILED, min(out, key=lambda entry: entry.started).error))

    def _judge_daemon(self, book: Book, node: str) -> None:
        why = book.bye(node)
        if why is not None:
            stopped = next((each for each in (Phase.CANCELLED, Phase.PREEMPTED) if why == each), None)
            failed = Ending(Phase.FAILED, RunError(f"daemon of {node}", why))
            self._end(failed if stopped is None else Ending(stopped))
            return
        url = book.daemon(node)
        if url is None:
            if time.monotonic() - self._began > self.setup_secs:
                self._lost(node, f"never came up within {self.setup_secs:.0f} s")
            return
        age = book.beat_ages.get(node, 0.0)
        if age > self._daemon_secs:
            self._lost(node, f"no heartbeat for {age:.0f} s", book.machine(node))
        elif age > QUIET_SECS and node not in self._probing:
            self._probing.add(node)
            task = asyncio.create_task(self._probe(node, url, book.machine(node)))
            self._probes.add(task)
            task.add_done_callback(self._probes.discard)

    async def _probe(self, node: str, url: str, machine: str) -> None:
        client = AsyncClient(url, self._token, timeout=POLL_SECS)
        try:
            await client.get("/health")
        except RpcError as error:
            if error.unreachable and "no answer within" not in error.message:
                self._lost(node, f"is gone ({error.message})", machine)
        finally:
            await client.close()
            self._probing.discard(node)

    def _lost(self, node: str, why: str, machine: str = "") -> None:
        self._end(Ending(Phase.FAILED, lost_daemon(self.context, node, why, machine)))


def lost_daemon(context: NodeContext, node: str, why: str, machine: str) -> RunError:
    """`machine`: what to look at, or to keep out of the next attempt."""
    partition, _, index = node.rpartition("-")
    planned = context.plan.partition(partition)
    parts = [each for each in planned.nodes[int(index)].servers if each.parts > 1] if planned else []
    why += "".join(f"; it held part {each.part} of {each.name}" for each in parts)
    log = context.run_dir.log_file(context.attempt, partition, int(index), "daemon")
    return RunError(f"daemon of {node}", f"on {machine}: {why}" if machine else why, log=str(log))
