"""The process: started as a node daemon starts it, found through its registration, ended by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3

from core.config import load
from core.rpc.service import Call, Service, serve_in_thread
from core.weights.fetch import fetch
from core.weights.publish import publish
from core.weights.tensors import read_tensors
from launcher.plan import plan
from launcher.run_dir import RunDir
from tests.embedded.harness import Reference, Remote
from tests.support.rows import stand_in_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run_dir(tmp_path: Path, checkpoints: dict[str, Path]) -> RunDir:
    overrides = [
        f"actor.path={checkpoints['vision']}",
        f"cluster.fileroot={tmp_path}",
        "embedded.context_length=2048",
        f"train_dataset.path={stand_in_rows(tmp_path / 'rows')}",
        "valid_dataset=null",
    ]
    config = load(ROOT / "configs" / "smoke.yaml", overrides)
    run = RunDir(tmp_path / "smoke" / "trial0")
    run.create()
    run.config.write_text(config.dump_yaml())
    run.plan.write_text(plan(config, device="cpu").to_json())
    return run


class Daemon:
    """As much of a node daemon as a server needs: it takes registrations."""

    def __init__(self, token: str) -> None:
        self.registered: dict[str, dict] = {}
        self.heard = threading.Event()
        service = Service("daemon", token)
        service.post("/register", self._register)
        self.url = serve_in_thread(service)

    async def _register(self, call: Call) -> dict:
        self.registered[call.json()["name"]] = call.json()
        self.heard.set()
        return {}


@pytest.fixture
def process(run_dir: RunDir, tmp_path: Path) -> Iterator[tuple[subprocess.Popen, Remote]]:
    daemon = Daemon(run_dir.read_token())
    words = ["--run-dir", str(run_dir.root), "--attempt", "1", "--partition", "inference", "--node", "0"]
    words += ["--name", "server-0", "--daemon", daemon.url, "--local", str(tmp_path / "local")]
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "launcher.roles.embedded_server", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert daemon.heard.wait(120), child.poll()
        entry = daemon.registered["server-0"]
        assert entry["pid"] == child.pid
        yield child, Remote(entry["url"], None, urllib3.PoolManager(), run_dir.read_token())  # type: ignore[arg-type]
    finally:
        child.kill()
        child.communicate()


def test_a_published_version_is_served_and_sigterm_ends_the_process(
    process: tuple[subprocess.Popen, Remote], checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    child, remote = process
    assert remote.get("/model_info")["model_path"] == str(checkpoints["vision"])
    manifest = publish(
        tmp_path / "weights",
        "v000003-r0",
        dict(read_tensors(checkpoints["vision_after"])),
        checkpoints["vision"],
        rank=0,
        world=1,
        gather=lambda item: [item],
        barrier=lambda: None,
        version=3,
        generation=0,
        lineage=[(3, 0)],
    )
    local = fetch(tmp_path / "weights" / "v000003-r0", manifest.digest, tmp_path / "local")
    remote.post("/update_weights_from_disk", model_path=str(local), weight_version="3")
    answer = remote.generate([1, 2, 3], max_new_tokens=8)
    assert answer["output_ids"] == Reference(checkpoints["vision_after"]).greedy([1, 2, 3], [], 8)
    assert Reference(local).greedy([1, 2, 3], [], 8) == answer["output_ids"], "transformers reads a published version"
    assert remote.get("/status")["weight_version"] == "3"
    child.send_signal(signal.SIGUSR1)
    child.send_signal(signal.SIGTERM)
    log, _ = child.communicate(timeout=30)
    assert child.returncode == 0, log
    assert "Thread 0x" in log or "Current thread" in log, "SIGUSR1 writes every stack"


def test_a_checkpoint_that_lacks_a_shard_is_an_error_that_names_it(
    run_dir: RunDir, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in checkpoints["vision"].iterdir():
        if path.name != "model-00002-of-00002.safetensors":
            (broken / path.name).write_bytes(path.read_bytes())
    config = load(run_dir.config, [f"actor.path={broken}"])
    run_dir.config.write_text(config.dump_yaml())
    words = ["--run-dir", str(run_dir.root), "--attempt", "1", "--partition", "inference", "--node", "0"]
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "launcher.roles.embedded_server", *words, "--name", "server-0"),
            *("--daemon", "http://127.0.0.1:9", "--local", str(tmp_path)),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "model-00002-of-00002.safetensors" in done.stderr.splitlines()[-1]
