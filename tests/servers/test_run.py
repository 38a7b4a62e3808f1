"""Whole runs with the real servers: three GRPO steps with weight updates; a server that is killed in the middle."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import urllib3

from tests.servers.conftest import BACKENDS, CACHE, available, configuration
from tests.support.runs import ROOT, await_gone, command, environment, launcher, lines, log_tails, steps

HERE = [backend for backend in BACKENDS if backend != "embedded" and available(backend)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    launcher("make-model", str(root / "tiny"), "--pictures", str(root / "pictures")).expect()
    return root


def arguments(backend: str, models: Path, place: Path, *more: str) -> list[str]:
    paths = configuration(models / "tiny").paths
    return [
        "run",
        "--emulate",
        "configs/smoke.yaml",
        f"allocation_mode={backend}:d1+archon:d1",
        "embedded.stands_in=false",
        "vllm.max_model_len=2048",
        "vllm.max_num_seqs=16",
        "sglang.context_length=2048",
        "sglang.max_running_requests=16",
        f"cluster.fileroot={place}",
        f"actor.path={models / 'tiny'}",
        f"train_dataset.path={models / 'pictures'}",
        f"valid_dataset.path={models / 'pictures'}",
        f"paths.cache={CACHE}",
        *(f"paths.{name}={value}" for name, value in paths.model_dump().items() if name.endswith("_python") and value),
        "rollout.setup_timeout=550",
        "experiment_name=servers",
        f"trial_name={backend}",
        *more,
    ]


@pytest.mark.timeout(700)
@pytest.mark.parametrize("backend", HERE)
def test_three_steps_with_updates_pass_the_gate_and_leave_nothing(backend: str, models: Path, tmp_path: Path) -> None:
    """Hotter and colder than 1, with a third of the vocabulary banned early: the gate is asked before step 1 and 2."""
    more = ["rollout.max_head_offpolicyness=0", "rollout.parity_check_steps=2", "gconfig.temperature=0.7"]
    more += ["gconfig.min_new_tokens=3", f"gconfig.stop_token_ids={list(range(3, 160))}", "gconfig.max_new_tokens=6"]
    before = segments_of_nobody()
    ended = launcher(*arguments(backend, models, tmp_path, *more), timeout=650)
    run = tmp_path / "servers" / backend
    assert ended.status == 0, log_tails(run)
    records = steps(run)
    assert [record["step"] for record in records] == [1, 2, 3]
    for record in records:
        # on policy: what every version sampled is scored with the weights that sampled it, here in float32
        assert record["behave_diff_mean"] <= 0.03 and record["behave_diff_max"] <= 0.3, record
        assert record["samples"] == 16 and record["void"] == {}
    gated = [record for record in records if record["parity_tokens"]]
    assert [record["step"] for record in gated] == [1, 2]
    for record in gated:
        assert record["parity_tokens"] >= 48 and record["parity_mean"] <= 0.03 < 0.1 <= record["parity_image_effect"]
    assert records[-1]["sync_version"] in (2, 3)
    await_gone(run)
    assert segments_of_nobody() <= before


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("backend", HERE)
def test_one_of_two_servers_killed_in_mid_group_loses_no_sample(backend: str, models: Path, tmp_path: Path) -> None:
    """Nothing is learned (lr 0), so that every token of every sample must still be what one server would have said."""
    more = ["total_train_steps=6", "gconfig.max_new_tokens=300", "actor.optimizer.lr=0.0", "gconfig.ignore_eos=true"]
    more += [f"allocation_mode={backend}:d2+archon:d1", "rollout.parity_check_steps=2"]
    words = arguments(backend, models, tmp_path, *more)
    run = tmp_path / "servers" / backend
    before = segments_of_nobody()
    with (tmp_path / "output").open("w") as output:
        process = subprocess.Popen(command(*words), cwd=ROOT, env=environment(), stdout=output, stderr=output)
    try:
        wait(run, process, lambda: len(steps(run)) >= 2 and running(run).get("server-0", 0) > 0)
        victims = [child for each in of_server(process.pid, "server-0") for child in each.children(recursive=True)]
        assert victims
        for victim in victims:
            victim.send_signal(signal.SIGKILL)
        assert process.wait(900) == 0, log_tails(run)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)
    records = steps(run)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    places = [(group["epoch"], group["position"]) for group in lines(run / "rollouts" / "index.jsonl")]
    assert sorted(places) == [(0, position) for position in range(24)] and not (run / "void.jsonl").exists()
    assert sum(record["restarts"] + record["continuations"] for record in records) > 0, "nothing was under way"
    for record in records:
        assert record["samples"] == 16 and record["response_tokens_mean"] == 300
        assert record["behave_diff_mean"] <= 0.03 and record["behave_diff_max"] <= 0.5, record
    assert json.loads((run / "state.json").read_text())["phase"] == "done"
    daemon = (run / "logs" / "1" / "inference-0" / "daemon.log").read_text()
    assert "server-0 died" in daemon and "server-1 died" not in daemon
    await_gone(run)
    assert segments_of_nobody() <= before


def wait(run: Path, process: subprocess.Popen, holds: Callable[[], bool], secs: float = 700) -> None:
    deadline = time.monotonic() + secs
    while not holds():
        assert process.poll() is None and time.monotonic() < deadline, log_tails(run)
        time.sleep(0.05)


def running(run: Path) -> dict[str, int]:
    """Requests under way on each server, as the rollout service tells it."""
    log = (run / "logs" / "1" / "training-0" / "rollout.log").read_text()
    url = log.partition("rollout service at ")[2].partition(",")[0]
    token = (run / "token").read_text().strip()
    reply = urllib3.request("GET", f"{url}/status", headers={"Authorization": f"Bearer {token}"}, timeout=10)
    return {name: server["running"] for name, server in reply.json()["servers"].items()}


def segments_of_nobody() -> set[str]:
    """Shared memory of servers that no living process maps."""
    names = {str(path) for path in Path("/dev/shm").iterdir() if path.name.startswith(("psm_", "sgl"))}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            names -= {"/dev/shm/" + line.partition("/dev/shm/")[2] for line in maps.read_text().splitlines()}
    return names


def of_server(launcher_pid: int, name: str) -> list[psutil.Process]:
    """The process of ours that stands before that server."""
    found = []
    for process in psutil.Process(launcher_pid).children(recursive=True):
        words = process.cmdline()
        guard = any("guard.py" in word for word in words)
        if "launcher.roles.inference_server" in words and name in words and not guard:
            found.append(process)
    return found
