"""Announcements, faults, the judgement of a stuck rank, and the chain of who waits on whom."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core.telemetry.phases import Announced, is_stopped, read_announced
from launcher.node.stuck import find_stuck
from launcher.waiting import chain
from tests.support.runs import ROOT, environment

PROGRAM = """
import socket, sys, time
from pathlib import Path
from core.telemetry.phases import announce, open_phases
open_phases(Path(sys.argv[1]), "one")
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
for phase in ("first", "second", "second", "third"):
    announce(phase)
print("end", flush=True)
time.sleep(60)
"""


def started(tmp_path: Path, fault: str = "") -> subprocess.Popen[str]:
    extra = {"VLM_RL_FAULT": fault} if fault else {}
    words = [sys.executable, "-P", "-c", PROGRAM, str(tmp_path)]
    return subprocess.Popen(words, cwd=ROOT, env=environment(extra), stdout=subprocess.PIPE, text=True)


def test_a_process_says_what_it_does(tmp_path: Path) -> None:
    with started(tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.stdout.readline() == "end\n"
        said = read_announced(tmp_path, "one")
        assert said is not None and (said.phase, said.count, said.pid) == ("third", 5, process.pid)
        assert 0 <= said.silent_secs() < 30
        process.kill()
    assert read_announced(tmp_path, "another") is None


def test_the_nth_time_is_the_last_and_only_once(tmp_path: Path) -> None:
    fault = f"one:second:2:kill:{tmp_path / 'mark'}"
    with started(tmp_path, fault) as process:
        assert process.wait(30) == -signal.SIGKILL
    assert (tmp_path / "mark").exists()
    said = read_announced(tmp_path, "one")
    assert said is not None and (said.phase, said.count) == ("second", 4)
    with started(tmp_path, fault) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.stdout.readline() == "end\n"
        process.kill()


def test_a_stopped_process_is_seen(tmp_path: Path) -> None:
    with started(tmp_path, f"one:third:1:stop:{tmp_path / 'mark'}") as process:
        deadline = time.monotonic() + 30
        while not is_stopped(process.pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.kill()
    assert not is_stopped(os.getpid())


def test_a_process_that_is_cut_off_lives_and_answers_nobody(tmp_path: Path) -> None:
    with started(tmp_path, f"one:third:1:cut:{tmp_path / 'mark'}") as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert process.stdout.readline() == "end\n"
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), 2)
        assert process.poll() is None
        process.kill()


def said(phase: str, silent: float) -> Announced:
    now = time.monotonic()
    return Announced(phase, now - silent, now - silent, 3, 999_999_999)


def test_ranks_are_stuck_when_all_are_silent_and_the_first_is_named() -> None:
    def deadline(phase: str) -> float:
        return {"saving": 100.0}.get(phase, 5.0)

    assert find_stuck({}, deadline) is None
    assert find_stuck({"rank-0": said("backward", 9), "rank-1": said("backward", 1)}, deadline) is None
    assert find_stuck({"rank-0": said("saving", 9), "rank-1": said("backward", 9)}, deadline) is None
    found = find_stuck({"rank-0": said("backward", 6), "rank-1": said("forward", 8)}, deadline)
    assert found is not None and found.name == "rank-1"
    assert "stuck in phase forward" in found.message and "rank-0 in backward" in found.message


def test_the_chain_ends_where_nothing_moves() -> None:
    waiting = {"step": 4, "total_steps": 9, "phase": "waiting for batch 5", "phase_secs": 41.0}
    server = {"state": "paused", "state_secs": 41.0, "running": 3, "silent_secs": 41.0, "reason": ""}
    servers = {f"server-{i}": server for i in range(3)} | {"server-3": {**server, "state": "serving"}}
    rollout = {
        "batches": 4,
        "consumed": 16,
        "ready": 0,
        "running": 8,
        "served": 4,
        "published": "v000004-r0",
        "servers": servers,
    }
    lines = chain({"trainer": waiting, "rollout": rollout, "data": {}}, {})
    assert "waiting for batch 5 for 41 s" in lines[0]
    assert "3 of 4 servers paused" in " ".join(lines) and "server-0: paused for 41 s, 3 requests" in " ".join(lines)

    behind = {**rollout, "running": 0, "published": "v000005-r0", "servers": {"server-0": server}}
    lines = chain({"trainer": waiting, "rollout": behind, "data": {}}, {})
    assert "1 of 1 servers paused" in lines[2], "nothing runs, and all the same it is a server that is waited for"
    lines = chain({"trainer": waiting, "rollout": {**behind, "published": "v000004-r0"}, "data": {}}, {})
    assert lines[2].startswith("← data: ")

    lines = chain({"trainer": waiting, "rollout": "does not answer: no answer within 5 s"}, {})
    assert lines[-1] == "← rollout: does not answer: no answer within 5 s"

    busy = {"rank-0": {"doing": "backward", "since_secs": 9.0, "silent_secs": 9.0},
            "rank-1": {"doing": "forward", "since_secs": 30.0, "silent_secs": 30.0}}  # fmt: skip
    lines = chain({"trainer": {"step": 1, "total_steps": 9, "phase": "training"}}, busy)
    assert "← rank-1, the longest without a sign for 30 s" in lines
