"""A run as it lives: what another user of the machine can reach of it, and where its secrets are found."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from launcher.run_dir import RunDir
from tests.support.other_user import as_nobody
from tests.support.runs import await_gone, command, environment, launcher, log_tails

pytestmark = pytest.mark.timeout(300)
ROUTES = {
    "GET": ["/status", "/metrics", "/registry", "/served", "/info", "/batches/1", "/prompts?n=1", "/model_info",
            "/images/" + "0" * 32, "/evaluations/x"],
    "POST": ["/register", "/fetch", "/release", "/restart", "/stop", "/stacks", "/publish", "/evaluate", "/retain",
             "/generate", "/update_weights_from_disk", "/pause_generation", "/continue_generation", "/abort_request"],
}  # fmt: skip
SECRETS = {"WANDB_API_KEY": "wandb-secret-7c1f", "HF_TOKEN": "hf_secret_9d2e"}


@dataclass(frozen=True)
class Living:
    run_dir: RunDir
    processes: list[psutil.Process]


@pytest.fixture(scope="module")
def living(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Living]:
    """A run in its middle; it goes on for as long as the tests look at it."""
    root = tmp_path_factory.mktemp("living")
    launcher("make-model", str(root / "tiny"), "--pictures", str(root / "pictures")).expect()
    words = [
        "submit", "--emulate", "configs/smoke.yaml", "experiment_name=e", "trial_name=living",
        f"cluster.fileroot={root / 'runs'}", f"paths.cache={root / 'cache'}", f"actor.path={root / 'tiny'}",
        f"train_dataset.path={root / 'pictures'}", f"valid_dataset.path={root / 'pictures'}",
        "total_train_steps=100000", "total_train_epochs=1000",
    ]  # fmt: skip
    subprocess.run(command(*words), env=environment(SECRETS), check=True, timeout=60, capture_output=True)
    run_dir = RunDir(root / "runs" / "e" / "living")
    deadline = time.monotonic() + 150
    while not (run_dir.metrics.exists() and '"step"' in run_dir.metrics.read_text()):
        assert time.monotonic() < deadline, log_tails(run_dir.root)
        time.sleep(0.2)
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(run_dir.root) in word for word in process.info["cmdline"] or []):
            found.append(process)
    yield Living(run_dir, found)
    launcher("cancel", str(run_dir.root), "-y", timeout=90)
    await_gone(run_dir.root)


def ports_of(living: Living) -> dict[int, str]:
    """Every TCP port that a process of the run listens on, with the process's role."""
    found = {}
    for process in living.processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            role = next((word for word in process.cmdline() if word.startswith("launcher.")), process.name())
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    assert connection.laddr.ip == "127.0.0.1", f"{role} listens on {connection.laddr}"
                    found[connection.laddr.port] = role
    return found


def ask(port: int, method: str, path: str, headers: dict[str, str]) -> int | str:
    """The HTTP status, or "not http"."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(method, path, body=b"{}" if method == "POST" else None, headers=headers)
        return connection.getresponse().status
    except (http.client.HTTPException, OSError):
        return "not http"
    finally:
        connection.close()


def test_another_user_is_refused_on_every_http_port(living: Living) -> None:
    ports = ports_of(living)

    def probe() -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {}
        for port in ports:
            statuses = found[str(port)] = {}
            for headers in ({}, {"Authorization": "Bearer " + "0" * 64}):
                for method, path in ((method, path) for method, paths in ROUTES.items() for path in paths):
                    if "not http" not in statuses.values():
                        statuses[f"{method} {path} {len(headers)}"] = ask(port, method, path, headers)
        return found

    answers = as_nobody(probe)
    assert "failed" not in answers, answers
    http_roles = set()
    for port, statuses in answers.items():
        role = ports[int(port)]
        if "not http" in statuses.values():
            assert role in ("launcher.node", "launcher.roles.trainer"), f"{role} has a port that is not HTTP: {port}"
            continue
        http_roles.add(role)
        assert set(statuses.values()) <= {401, 404, 405}, f"{role} {port}: {statuses}"
        assert 401 in statuses.values(), f"{role} {port}: {statuses}"
    assert {"launcher.roles.embedded_server", "launcher.roles.rollout", "launcher.roles.data"} <= http_roles
    assert {"launcher.node", "launcher.roles.trainer"} <= http_roles


def test_another_user_reads_nothing_of_the_run(living: Living) -> None:
    if os.geteuid() != 0:
        assert living.run_dir.root.stat().st_mode & 0o077 == 0
        return
    places = [living.run_dir.token, living.run_dir.config, living.run_dir.metrics]
    shm = Path("/dev/shm") / f"vlm-rl-{os.getuid()}"
    places += [path for path in shm.rglob("*") if path.is_file()][:50]

    def read() -> list[str]:
        opened = []
        for path in places:
            try:
                path.read_bytes()
            except OSError:
                continue
            opened.append(str(path))
        return opened

    assert as_nobody(read) == []


def test_secrets_are_in_no_file_no_command_line_and_no_answer(living: Living) -> None:
    token = living.run_dir.read_token()
    secrets = {"token": token, **SECRETS}
    told: dict[str, str] = {}
    # the run lives: a checkpoint's temporary directory may go while it is looked at
    files = [Path(folder) / name for folder, _, names in os.walk(living.run_dir.root) for name in names]
    for path in files:
        if path != living.run_dir.token and "weights" not in path.parts:
            with contextlib.suppress(FileNotFoundError):
                told[str(path)] = path.read_bytes().decode("latin-1")
    assert str(living.run_dir.config) in told and str(living.run_dir.state) in told
    for process in psutil.process_iter(["cmdline"]):
        told[f"ps {process.pid}"] = " ".join(process.info["cmdline"] or [])
    root = str(living.run_dir.root)
    for words in (["status", root], ["status", root, "--json"], ["why", root], ["logs", root], ["report", root]):
        ended = launcher(*words)
        told[" ".join(words)] = ended.out + ended.err
    told["report.html"] = (living.run_dir.root / "report.html").read_text()
    found = [(name, place) for name, secret in secrets.items() for place, text in told.items() if secret in text]
    assert found == []


def test_only_the_owner_may_stop_it(living: Living) -> None:
    if os.geteuid() != 0:
        return

    def kill() -> int:
        refused = 0
        for process in living.processes:
            try:
                os.kill(process.pid, signal.SIGTERM)
            except PermissionError:
                refused += 1
            except ProcessLookupError:
                pass
        return refused

    assert as_nobody(kill) > 0
    assert json.loads(living.run_dir.state.read_text())["phase"] == "running"


def test_ports_are_closed_to_the_outside(living: Living) -> None:
    """Everything is on loopback, so an address of another interface reaches nothing."""
    outer = [
        address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family is socket.AF_INET and not address.address.startswith("127.")
    ]
    for address in outer:
        for port in ports_of(living):
            with socket.socket() as probe:
                probe.settimeout(2)
                assert probe.connect_ex((address, port)) != 0, f"{address}:{port} is open"
