"""A server over several nodes as the daemons tell of it: keys, rows, what a lost node held."""

from __future__ import annotations

from pathlib import Path

from launcher.commands.status import status_text
from launcher.commands.why import parts as missing
from launcher.liveness import Liveness
from launcher.node import book as entries
from launcher.node.api import registry_reply
from launcher.node.book import Book, ServerEntry
from launcher.node.children import ChildState
from launcher.node.lead import lost_daemon
from launcher.node.meeting import Meeting, PartReport
from launcher.node.parts import Parts
from launcher.node.specs import NodeContext, server_specs
from launcher.node.state import Phase, RunError, State
from launcher.plan import Node, Partition, Plan, Server
from launcher.run_dir import RunDir
from tests.node.conftest import BATCH

MEETING = Meeting("a1", "10.0.0.1", 12001)


def two_servers() -> Plan:
    nodes = [Node(i, i, [0, 1], [Server(f"server-{i // 2}", [0, 1], i % 2, 2)], []) for i in range(4)]
    return Plan(
        "r", "cuda", False, [], [], [Partition("inference", "sglang", 2, 1, 4, 1, 1, nodes)], BATCH, [], 0, [], [], {}
    )


def context(tmp_path: Path, node: int) -> NodeContext:
    return NodeContext(RunDir(tmp_path / "run"), two_servers(), 1, "inference", node, tmp_path, "http://d", "s")


def test_the_plan_comes_back_from_its_file() -> None:
    assert Plan.from_json(two_servers().to_json()) == two_servers()


def test_each_part_is_a_process_of_its_node(tmp_path: Path) -> None:
    names = [[spec.name for spec in server_specs(context(tmp_path, node))] for node in range(4)]
    assert names == [["server-0"], ["server-0-part-1"], ["server-1"], ["server-1-part-1"]]
    (spec,) = server_specs(context(tmp_path, 3))
    assert spec.log.name == "server-1-part-1.log" and "launcher.roles.inference_server" in spec.command


def test_a_part_is_no_server_of_the_run_and_its_node_is_named() -> None:
    plan = two_servers()
    keys = entries.keys(plan)
    assert {"server/server-0", "meeting/server-0", "part/server-0-part-1"} <= set(keys)
    assert "server/server-0-part-1" not in keys and "part/server-0" not in keys
    values = dict.fromkeys(keys, "") | dict(
        [
            *(entries.daemon(f"inference-{i}", f"http://node-{i}", "m") for i in range(4)),
            entries.server(ServerEntry("server-1", "http://s", "sglang", "http://node-2", "up", 1.0)),
            entries.meeting("server-1", MEETING),
            entries.part(PartReport("server-1-part-1", "server-1", 1, "a1", "up")),
        ]
    )
    reply = registry_reply(Book(values), plan, Phase.RUNNING)
    (server,) = reply["servers"]
    assert (server["daemon"], server["daemons"]) == ("http://node-2", ["http://node-2", "http://node-3"])
    assert reply["meetings"] == {"server-1": {"start": "a1", "host": "10.0.0.1", "port": 12001}}
    assert [(row["name"], row["node"], row["state"], row["start"]) for row in reply["parts"]] == [
        ("server-0-part-1", "inference-1", "starting", ""),
        ("server-1-part-1", "inference-3", "up", "a1"),
    ]
    assert missing(reply) == ["← server-0: part 1 on inference-1 is starting"]


def test_status_names_the_parts(tmp_path: Path) -> None:
    row = {"name": "server-0-part-1", "server": "server-0", "part": 1, "node": "inference-1", "start": "a"}
    answer = {
        "phase": "running",
        "children": {},
        "servers": [],
        "services": {},
        "parts": [{**row, "state": "down", "why": "its process ended with status -9"}],
    }
    said = status_text(RunDir(tmp_path), Liveness(True, State(Phase.RUNNING, 1), answer=answer), 0.0)
    assert "server-0-part-1 down      part 1 of server-0, on inference-1: its process ended with status -9" in said


def test_what_a_daemon_writes_of_its_parts() -> None:
    written: list[tuple[str, str]] = []

    def put(key: str, value: str) -> None:
        written.append((key, value))

    def last() -> PartReport:
        return Book(dict(written[-1:])).parts()[0]

    head, part, alone = Server("server-0", [], 0, 2), Server("server-0", [], 1, 2), Server("server-1", [])
    assert not Parts([alone], put) and Parts([head], put)
    heads, others = Parts([head], put), Parts([part], put)
    assert heads.announce("server-0", MEETING) and Book(dict(written)).meetings() == {"server-0": MEETING}
    assert not heads.changed("server-0", ChildState.UP, None), "it is the server that the run asks"
    assert len(written) == 1
    assert not heads.changed("server-0", ChildState.WAITING, None) and Book(dict(written)).meetings() == {}
    assert not heads.announce("server-1", MEETING) and not others.announce("server-0-part-1", MEETING)
    assert others.report("server-0-part-1", start="a1", state="up") and last().state == "up"
    assert others.changed("server-0-part-1", ChildState.UP, None) and last().state == "up"
    assert others.changed("server-0-part-1", ChildState.WAITING, None)
    assert (last().start, last().state) == ("a1", "down"), "a process after it must not join that start again"
    assert others.changed("server-0-part-1", ChildState.OUT, RunError("x", "no memory"))
    assert (last().start, last().state, last().why) == ("a1", "out", "no memory")
    assert not others.report("server-0", start="a1", state="up")
    assert not Parts([alone], put).changed("server-1", ChildState.WAITING, None)


def test_a_lost_node_is_named_with_what_it_held(tmp_path: Path) -> None:
    error = lost_daemon(context(tmp_path, 0), "inference-3", "no heartbeat for 31 s", "n4")
    assert (error.process, error.message) == (
        "daemon of inference-3",
        "on n4: no heartbeat for 31 s; it held part 1 of server-1",
    )
