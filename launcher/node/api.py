"""The HTTP routes of a node daemon. Owns reading requests and shaping answers; the daemon does the rest."""

from __future__ import annotations

import faulthandler
import signal
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from core.rpc.errors import RpcError
from core.rpc.service import Call, Reply, Service
from core.telemetry.phases import read_announced
from launcher.node.book import SERVICES, Book, Ending, ServerEntry, node_names
from launcher.node.children import Child, ChildState
from launcher.node.meeting import Meeting, PartReport
from launcher.node.state import Phase
from launcher.planning.layout import Plan
from launcher.roles.arguments import PHASES

if TYPE_CHECKING:
    from launcher.node.daemon import Daemon


def open_api(daemon: Daemon) -> Service:
    api = Api(daemon)
    service = Service(f"daemon-{daemon.context.name}", daemon.token, status=api.status, metrics=api.metrics)
    api.add_routes(service)
    return service


class Api:
    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon

    def add_routes(self, service: Service) -> None:
        service.post("/register", self.register, once=True)
        service.post("/meeting", self.meeting)
        service.post("/part", self.part)
        service.get("/registry", self.registry)
        service.post("/fetch", self.fetch, once=True)
        service.post("/release", self.release)
        service.post("/restart", self.restart)
        service.post("/stop", self.stop)
        service.post("/stacks", self.stacks)

    def status(self) -> dict[str, Any]:
        context = self.daemon.context

        def said(child: Child) -> dict[str, Any]:
            found = read_announced(context.local / PHASES, child.name)
            if found is None:
                return {}
            return {"doing": found.phase, "since_secs": found.in_phase_secs(), "silent_secs": found.silent_secs()}

        children = {
            child.name: {
                "state": child.state,
                "pid": child.pid,
                "starts": child.starts,
                "url": child.url,
                **said(child),
            }
            for child in self.daemon.children
        }
        return {
            "partition": context.partition,
            "node": context.node,
            "run_dir": str(context.run_dir.root),
            "attempt": context.attempt,
            "phase": self.phase,
            "generation": self.daemon.ranks.generation,
            "children": children,
            "services": self.daemon.lead.statuses if self.daemon.lead else {},
            "servers": self._registry()["servers"] if self.daemon.lead else [],
            "parts": self._registry()["parts"] if self.daemon.lead else [],
        }

    def metrics(self) -> dict[str, float]:
        return {
            "children_up": sum(child.state is ChildState.UP for child in self.daemon.children),
            "restarts_total": sum(each.total for each in self.daemon.crew.restarts.values()),
            "generation": self.daemon.ranks.generation,
            "rank_deaths_total": self.daemon.lead.rank_deaths if self.daemon.lead else 0,
        }

    @property
    def phase(self) -> Phase:
        if self.daemon.ending is not None:
            return Phase.STOPPING
        return self.daemon.lead.state.phase if self.daemon.lead else Phase.RUNNING

    async def register(self, call: Call) -> Reply:
        body = call.json()
        self.daemon.registered(text(body, "name"), text(body, "url"))
        return {}

    async def meeting(self, call: Call) -> Reply:
        """The head of a server over several nodes starts: its parts meet there."""
        body = call.json()
        name, port = text(body, "name"), body.get("port")
        if not isinstance(port, int):
            raise RpcError(400, "'port' must be a number")
        found = Meeting(text(body, "start"), text(body, "host"), port)
        if not self.daemon.parts.announce(name, found):
            raise RpcError(404, f"{name!r} is no head of a server over several nodes here")
        return {}

    async def part(self, call: Call) -> Reply:
        """A part that is no head says how it stands; the first time, that it is there."""
        body = call.json()
        name, why = text(body, "name"), str(body.get("why", ""))
        if not self.daemon.parts.report(name, state=text(body, "state"), start=text(body, "start"), why=why):
            raise RpcError(404, f"{name!r} is no part of a server over several nodes here")
        if self.daemon.crew.children[name].state is ChildState.STARTING:
            self.daemon.crew.registered(name, "")
        return {}

    async def registry(self, call: Call) -> Reply:
        return self._registry()

    def _registry(self) -> dict[str, Any]:
        return registry_reply(self.daemon.ledger.book, self.daemon.context.plan, self.phase)

    async def fetch(self, call: Call) -> Reply:
        body = call.json()
        return await self.daemon.fetches.get(text(body, "name"), text(body, "path"), text(body, "digest"))

    async def release(self, call: Call) -> Reply:
        await self.daemon.fetches.release(text(call.json(), "name"))
        return {}

    async def restart(self, call: Call) -> Reply:
        name = text(call.json(), "name")
        if name not in self.daemon.crew.children:
            raise RpcError(404, f"no child {name!r} on this node, only {sorted(self.daemon.crew.children)}")
        self.daemon.crew.restart(name)
        return {}

    async def stacks(self, call: Call) -> Reply:
        """Every child of this node, and the daemon itself, writes the stack of each thread to its log."""
        faulthandler.dump_traceback(all_threads=True)
        for child in self.daemon.children:
            child.pass_on(signal.SIGUSR1)
        return {"logs": {child.name: str(child.spec.log) for child in self.daemon.children}}

    async def stop(self, call: Call) -> Reply:
        self.daemon.say("asked to stop (POST /stop)")
        self.daemon.end(Ending(Phase.CANCELLED))
        return {}


def text(body: dict[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise RpcError(400, f"{key!r} must be a string that is not empty")
    return value


def registry_reply(book: Book, plan: Plan, phase: Phase) -> dict[str, Any]:
    services = {name: book.service(name) for name in SERVICES}
    daemons = []
    for node in node_names(plan):
        url = book.daemon(node)
        if url is not None:
            partition, _, index = node.rpartition("-")
            age = round(book.beat_ages.get(node, 0.0), 3)
            daemons.append({"partition": partition, "node": int(index), "url": url, "beat_age": age})
    servers = [
        {
            "name": entry.name,
            "url": entry.url,
            "backend": entry.backend,
            "daemon": entry.daemon,
            "daemons": daemons_of(book, plan, entry),
            "state": "up" if entry.state == "up" else "down",
            "out": entry.state == "out",
            "started": entry.started,
        }
        for entry in book.servers()
    ]
    return {
        "services": {name: url for name, url in services.items() if url},
        "servers": servers,
        "meetings": {name: asdict(found) for name, found in book.meetings().items()},
        "parts": part_rows(book, plan),
        "daemons": daemons,
        "phase": phase,
        "generation": book.generation,
    }


def daemons_of(book: Book, plan: Plan, entry: ServerEntry) -> list[str]:
    """Of every node that holds a part of a server: each has to have a version before it is loaded."""
    partition = plan.partition("inference")
    nodes = partition.nodes_of(entry.name) if partition else []
    others = [book.daemon(f"inference-{node.index}") for node in nodes[1:]]
    return [entry.daemon, *(url for url in others if url)]


def part_rows(book: Book, plan: Plan) -> list[dict[str, Any]]:
    """Every planned part that is no head, whether or not it has said anything."""
    told = {each.name: each for each in book.parts()}
    return [
        {
            "name": server.process,
            "server": server.name,
            "part": server.part,
            "node": f"{each.name}-{node.index}",
            **({"start": "", "state": "starting", "why": ""} | _standing(told.get(server.process))),
        }
        for each in plan.partitions
        for node in each.nodes
        for server in node.servers
        if server.part
    ]


def _standing(told: PartReport | None) -> dict[str, Any]:
    return {"start": told.start, "state": told.state, "why": told.why} if told else {}
