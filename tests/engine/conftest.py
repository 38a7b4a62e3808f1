"""One checkpoint and its batch for the whole area."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.scene import Batch, make_batch, make_checkpoint

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "tied")


@pytest.fixture(scope="session")
def batch(checkpoint: Path) -> Batch:
    return make_batch(checkpoint)


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> tuple[Path, list[dict[str, Any]]]:
    """What two gloo ranks found (one list entry a rank), and the directory that they wrote to."""
    out = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    logs = [out / f"rank-{rank}.log" for rank in range(2)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-m", "tests.engine.ranks", str(out), str(checkpoint), str(rank), "2"]
        with log.open("w") as file:
            processes.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)
            )
    try:
        codes = [process.wait(timeout=110) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-4000:] for log in logs)
    return out, [torch.load(out / f"rank-{rank}.pt") for rank in range(2)]
