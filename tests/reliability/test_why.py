"""`why` on a run that lives, on one whose server is stopped, and on one that is dead: who waits on whom, and where."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.runs import await_gone, command, environment, launcher, log_tails, steps

pytestmark = pytest.mark.timeout(300)
PROCESSES = {"data", "rollout", "rank-0"}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """In its middle, and without an end."""
    launcher("make-model", str(tmp_path / "tiny"), "--pictures", str(tmp_path / "pictures")).expect()
    words = [
        "submit", "--emulate", "configs/smoke.yaml", "experiment_name=e", "trial_name=why",
        f"cluster.fileroot={tmp_path}", f"paths.cache={tmp_path / 'cache'}", f"actor.path={tmp_path / 'tiny'}",
        f"train_dataset.path={tmp_path / 'pictures'}", "valid_dataset=null",
        "total_train_steps=100000", "total_train_epochs=1000",
    ]  # fmt: skip
    subprocess.run(command(*words), env=environment(), check=True, timeout=60, capture_output=True)
    root = tmp_path / "e" / "why"
    until(lambda: bool(steps(root)), root)
    yield root
    for process in processes(root, "launcher.node"):
        process.kill()
    await_gone(root, 60)


def until(condition: Callable[[], bool], run: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, log_tails(run)
        time.sleep(0.2)


def processes(run: Path, role: str) -> list[psutil.Process]:
    """Those of a role, without their guards."""
    found = [each for each in psutil.process_iter(["cmdline"]) if str(run) in (each.info["cmdline"] or [])]
    return [each for each in found if role in each.info["cmdline"] and "--grace" not in each.info["cmdline"][:8]]


def why(run: Path, *words: str) -> dict:
    return json.loads(launcher("why", str(run), "--json", *words).expect().out)


def test_why_names_what_a_run_waits_for_alive_stuck_and_dead(run: Path) -> None:
    told = why(run, "--stacks")
    assert told["chain"][0].startswith("trainer: step ")
    signs = {line.split()[0] for line in told["last_signs"]}
    assert signs >= PROCESSES
    assert any(line.startswith("last step recorded:") for line in told["files"])
    for name in (*PROCESSES, "server-0", "daemon of training-0", "daemon of inference-0"):
        assert "File " in told["stacks"][name] and "hread" in told["stacks"][name], (name, told["stacks"][name])
    assert "rl.py" in told["stacks"]["rank-0"], "the trainer stands in its loop"

    (server,) = processes(run, "launcher.roles.embedded_server")
    os.kill(server.pid, signal.SIGSTOP)
    until(lambda: any("server-0: " in line for line in why(run)["chain"]), run)
    chain = why(run)["chain"]
    assert chain[0].startswith("trainer: ") and "waiting for batch" in chain[0], chain
    assert chain[1].startswith("← rollout: ") and "1 of 1 servers" in chain[2], chain
    text = launcher("why", str(run), "--stacks").expect().out
    assert "── server-0\nwrote nothing: it is stopped, or gone" in text

    for daemon in processes(run, "launcher.node"):
        daemon.kill()
    await_gone(run, 60)
    until(lambda: "dead" in why(run)["verdict"], run)
    told = why(run, "--stacks")
    assert told["chain"] == [] and any(line.startswith("last batch logged:") for line in told["files"])
    assert set(told["stacks"]) >= {*PROCESSES, "server-0"}
