"""A run directory whose processes are the stand-ins of tests/node/roles, and launchers of it as real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from core.config import load
from core.rpc.client import Client
from launcher.emulate import tiny_checkpoint
from launcher.launch import begin
from launcher.node.local_dir import local_root
from launcher.node.specs import REPOSITORY
from launcher.node.state import State, read_rendezvous, read_state
from launcher.plan import BatchPlan, Node, Partition, Plan, Rank, Server
from launcher.run_dir import RunDir
from tests.node.living import processes_naming, until
from tests.support.rows import stand_in_rows

BATCH = BatchPlan(1, 1, 1, 1, 1, 1, 1, 1)


def made_plan(*, servers: int = 1, ranks: int = 2, run_id: str = "smoke-t") -> Plan:
    inference = Node(0, 0, [], [Server(f"server-{number}", []) for number in range(servers)], [])
    training = Node(0, 0, [], [], [Rank(number, number, None) for number in range(ranks)])
    partitions = [Partition("inference", "embedded", servers, 1, 1, 1, 1, [inference])] if servers else []
    partitions += [Partition("training", "archon", ranks, 1, 1, 1, 1, [training])] if ranks else []
    return Plan(run_id, "cpu", True, [], [], partitions, BATCH, [], 0, [], [], {})


@dataclass
class FakeRun:
    run_dir: RunDir
    plan: Plan
    launchers: list[subprocess.Popen[str]] = field(default_factory=list)

    def launch(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-P", "-m", "tests.node.attach", str(self.run_dir.root), *words]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, env=environment, start_new_session=True, cwd=self.run_dir.root
        )
        self.launchers.append(process)
        return process

    def behave(self, **behaviour: str) -> None:
        table = {name.replace("_", "-"): act for name, act in behaviour.items()}
        (self.run_dir.root / "behaviour.json").write_text(json.dumps(table))

    def started(self) -> list[dict[str, Any]]:
        path = self.run_dir.root / "started.jsonl"
        written = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in written if line.endswith("\n")]

    def await_started(self, count: int) -> list[dict[str, Any]]:
        return until(lambda: len(self.started()) >= count and self.started(), 90, f"{count} processes started")

    @property
    def state(self) -> State:
        found = read_state(self.run_dir)
        assert found is not None
        return found

    def await_phase(self, *phases: str, seconds: float = 60) -> State:
        return until(lambda: self.state if self.state.phase in phases else None, seconds, f"phase {phases}")

    def daemon(self) -> Client:
        found = until(lambda: read_rendezvous(self.run_dir, self.state.attempt), 30, "rendezvous")
        return Client(found.daemon, self.run_dir.read_token(), timeout=10)

    def survivors(self) -> list[str]:
        mine = {process.pid for process in self.launchers}
        return [line for line in processes_naming(str(self.run_dir.root)) if int(line.split()[0]) not in mine]

    @property
    def local(self) -> Path:
        return local_root(None, self.plan.run_id, self.run_dir)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """paths.cache with the tiny checkpoint and some rows, so that a resume can plan again."""
    root = tmp_path_factory.mktemp("cache")
    stand_in_rows(root / "rows")
    tiny_checkpoint(root)
    return root


@pytest.fixture
def fake_run(tmp_path: Path, cache: Path) -> Iterator[Callable[..., FakeRun]]:
    made: list[FakeRun] = []

    def make(
        name: str = "t", *, overrides: tuple[str, ...] = (), behaviour: dict[str, str] | None = None, **plan: Any
    ) -> FakeRun:
        place: tuple[str, ...] = (f"cluster.fileroot={tmp_path}", f"trial_name={name}", "recover.mode=disabled")
        place += ("reward=exact_match",)  # the one of smoke.yaml is found from this repository only
        place += (f"paths.cache={cache}", f"actor.path={tiny_checkpoint(cache)}")
        rows = cache / "rows"
        place += (f"train_dataset.path={rows}", f"valid_dataset.path={rows}")
        config = load(REPOSITORY / "configs" / "smoke.yaml", [*place, *overrides])
        launch = begin(config, made_plan(**plan))
        made.append(FakeRun(launch.run_dir, launch.plan))
        made[-1].behave(**(behaviour or {}))
        return made[-1]

    yield make
    for run in made:
        for process in run.launchers:
            process.kill()
            process.communicate()
        for line in run.survivors():
            os.kill(int(line.split()[0]), signal.SIGKILL)
