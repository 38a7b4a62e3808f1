"""Asking Slurm: one squeue and one sacct for all jobs, seldom; what they print, and what it means when they do not."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.config import Config
from core.config.slurm import Slurm
from core.rpc.service import bound_socket
from launcher.commands import list as list_command
from launcher.commands.status import job_lines, status_text
from launcher.liveness import look
from launcher.node.state import Phase, Rendezvous, State, beat, heartbeat_file, write_rendezvous, write_state
from launcher.run_dir import RunDir
from launcher.slurm import queue
from launcher.slurm.queue import Watch, look_up, write_jobs
from launcher.slurm.states import MEANINGS, Fate
from tests.slurm.conftest import plan_of

Say = Callable[..., Path]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Puts a program of Slurm's on the path that prints the lines given, and writes down how it was called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setattr(queue, "COMMAND_SECS", 2.0)

    def program(name: str, *lines: str, status: int = 0, hangs: bool = False) -> Path:
        calls = tmp_path / f"{name}.calls"
        calls.touch()
        body = "exec sleep 60" if hangs else f"cat <<'END'\n{chr(10).join(lines)}\nEND\nexit {status}"
        path = programs / name
        path.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{body}\n')
        path.chmod(0o755)
        return calls

    return program


def row(job_id: str, state: str, *, reason: str = "None", start: str = "N/A", nodes: str = "", user: str = "me") -> str:
    return "|".join((job_id, state, reason, start, nodes, user, "0:00", "1:00", "1"))


def run_of(root: Path, *jobs: str, phase: Phase = Phase.STARTING) -> RunDir:
    made = RunDir(root)
    made.create()
    made.submitit.mkdir()
    write_state(made, State(phase, 1))
    write_jobs(made, list(jobs))
    beat(made)
    return made


def test_one_squeue_and_one_sacct_for_all_runs(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_command, "WATCH", fresh := Watch())
    monkeypatch.setattr("launcher.liveness.WATCH", fresh)
    squeue = say("squeue", *(row(f"{job}+{index}", "PENDING") for job in (11, 12, 13) for index in (0, 1)))
    sacct = say("sacct", *(row(str(job), "TIMEOUT") for job in (14, 15)))
    for job in range(11, 16):
        run_of(tmp_path / "runs" / "e" / f"t{job}", str(job))
    rows = [list_command.row(each) for each in list_command.find_all([tmp_path / "runs"])]
    assert [each["verdict"] for each in rows] == ["pending"] * 3 + ["failed"] * 2
    assert len(squeue.read_text().splitlines()) == len(sacct.read_text().splitlines()) == 1
    assert "-j 11,12,13,14,15" in squeue.read_text() and "-j 14,15" in sacct.read_text()


def test_slurm_is_not_asked_again_within_ten_seconds(say: Say) -> None:
    calls = say("squeue", row("7", "RUNNING"))
    watch = Watch()
    assert Slurm().poll_secs == watch.poll_secs == 10.0
    for _ in range(5):
        assert watch.views(["7"]) is not None
    assert len(calls.read_text().splitlines()) == 1
    watch.poll_secs = 0.0
    watch.views(["7"])
    assert len(calls.read_text().splitlines()) == 2


@pytest.mark.parametrize("failure", [{"status": 1}, {"hangs": True}])
def test_a_slurm_that_does_not_answer_is_not_taken_for_the_end_of_the_job(say: Say, failure: dict[str, Any]) -> None:
    say("squeue", **failure)
    assert look_up(["7"]) is None


def test_a_job_that_squeue_forgot_on_a_site_without_accounting_is_unknown(say: Say) -> None:
    say("squeue")
    say("sacct", status=1)
    assert look_up(["7"]) == {}


@pytest.mark.parametrize("state", sorted(MEANINGS))
def test_status_tells_every_state_in_words(
    say: Say, recipe: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """And a run is alive as long as its job is."""
    monkeypatch.setattr("launcher.liveness.WATCH", Watch())
    say("squeue", row("7", state, reason="Resources", start="2030-01-01T00:00:00", nodes="n1"))
    run_dir = run_of(tmp_path / "run", "7")
    run_dir.plan.write_text(plan_of(recipe("cluster.n_nodes=1")).to_json())
    found = look(run_dir)
    assert found.alive == MEANINGS[state].alive
    line = job_lines(run_dir, found)[0]
    assert MEANINGS[state].text in line and "on n1" in line
    waits = MEANINGS[state].fate is Fate.WAITING
    assert ("(Resources), starts 2030-01-01T00:00:00" in line) == waits


def test_a_running_job_without_a_heartbeat_is_told(
    say: Say, recipe: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the only node of a run is lost nobody is left to write it down, and Slurm may take minutes."""
    monkeypatch.setattr("launcher.liveness.WATCH", Watch())
    say("squeue", row("7", "RUNNING", nodes="n1"))
    run_dir = run_of(tmp_path / "run", "7", phase=Phase.RUNNING)
    run_dir.plan.write_text(plan_of(recipe("cluster.n_nodes=1")).to_json())
    with bound_socket("127.0.0.1") as nobody:
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
    write_rendezvous(run_dir, Rendezvous(address, "", "10.0.0.7", 1, 1, 0.0))
    assert "no heartbeat" not in status_text(run_dir, look(run_dir), time.time())
    os.utime(heartbeat_file(run_dir), (time.time() - 40, time.time() - 40))
    said = status_text(run_dir, look(run_dir), time.time())
    assert re.search(r"no heartbeat for 4\d s: the lead daemon or its node \(10.0.0.7\) is gone", said), said
