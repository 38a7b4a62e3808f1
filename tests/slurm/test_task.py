"""What a task makes of its node before it becomes the daemon: limits, caches, no proxies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from core.config import load
from launcher.run_dir import RunDir
from launcher.slurm.task import CACHES, PROXIES, Place, scratch_directory, surroundings
from tests.support.runs import ROOT

PLACE = Place("training", 0, "n1", 1, {"inference": ["n0"], "training": ["n1"]}, "login")


@pytest.mark.parametrize(("hard", "said"), [(512, "nofile is 512, 4096 is better"), (8192, "")])
def test_limits_are_raised_or_reported(hard: int, said: str) -> None:
    """In a process of its own: a hard limit cannot be taken back."""
    code = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (128, {hard}))
from launcher.slurm.preflight import raise_limits
low = [line for line in raise_limits() if line.startswith("nofile")]
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], *low)
"""
    words = [sys.executable, "-P", "-c", code]
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == f"{hard} {said}".strip(), done.stderr


def test_temporary_files_and_caches_are_local_to_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, local = tmp_path / "home", tmp_path / "scratch"
    home.mkdir()
    local.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("SLURM_TMPDIR", str(local))
    for name in PROXIES:
        monkeypatch.setenv(name, "http://proxy:3128")
    config = load(ROOT / "configs" / "smoke.yaml", [])
    chosen = Path(config.paths.local) if config.paths.local else local
    scratch = scratch_directory(config, PLACE)
    assert scratch.parent == chosen and "training-0" in scratch.name
    found = surroundings(scratch)
    assert found.keys() >= CACHES.keys()
    assert all(Path(found[name]).is_dir() and Path(found[name]).is_relative_to(scratch) for name in CACHES)
    assert not any(name in os.environ for name in PROXIES) and found["NO_PROXY"] == "*"
    assert list(home.iterdir()) == []


def test_the_local_directory_of_the_configuration_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TMPDIR", "/tmp")
    config = load(ROOT / "configs" / "smoke.yaml", [f"paths.local={tmp_path}"])
    assert scratch_directory(config, PLACE).parent == tmp_path


@pytest.mark.parametrize("status", [85, 86, 1, 0])
def test_how_a_daemon_ended_is_the_exit_status_of_its_task(status: int, tmp_path: Path) -> None:
    """85: stopped by the cluster, 86: lost its lead; the batch script tells them from an error."""
    RunDir(tmp_path).create()
    code = f"""
import sys
from launcher.slurm import task
task.serve = lambda run_dir, place: {status}
sys.exit(task.main([{str(tmp_path)!r}, "training"]))
"""
    place = {"VLM_RL_ATTEMPT": "1", "SLURM_PROCID": "0", "VLM_RL_TRAINING_NODES": "n1", "SLURMD_NODENAME": "n1"}
    words = [sys.executable, "-P", "-c", code]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT), **place}, timeout=60, check=False)
    assert done.returncode == status
