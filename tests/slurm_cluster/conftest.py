"""One real cluster for all tests: four nodes of eight fake GPUs, a network namespace each, with accounting."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from launcher.node.state import State, read_state
from launcher.run_dir import RunDir
from tests.support.runs import ROOT, Ended, command, environment, log_tails, processes_of, steps
from tests.support.slurm_cluster.cluster import Cluster, make, until


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    root = Path(tempfile.mkdtemp(prefix="vlmrl-slurm-"))
    made = make(root, netns=True)
    try:
        yield made.start()
    finally:
        made.stop()


@pytest.fixture(scope="session")
def shared() -> Iterator[Path]:
    """What every node and every user sees: model, pictures, run directories."""
    with tempfile.TemporaryDirectory(prefix="vlmrl-shared-", ignore_cleanup_errors=True) as name:
        root = Path(name)
        root.chmod(0o755)
        words = command("make-model", str(root / "tiny"), "--pictures", str(root / "pictures"))
        subprocess.run(words, env=environment(), cwd=root, check=True, timeout=300, capture_output=True)
        yield root


@dataclass
class Run:
    """One run of the smoke configuration on the cluster, driven by the commands that users type."""

    cluster: Cluster
    shared: Path
    trial: str
    overrides: list[str] = field(default_factory=list)
    where: Path = ROOT
    place: Path | None = None
    env: dict[str, str] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        return self.place or self.shared / "runs" / "slurm" / self.trial

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.root)

    @property
    def words(self) -> list[str]:
        return [
            str(ROOT / "configs" / "smoke.yaml"), "scheduler.type=slurm",
            "experiment_name=slurm", f"trial_name={self.trial}",
            f"cluster.fileroot={self.shared / 'runs'}", f"actor.path={self.shared / 'tiny'}",
            f"train_dataset.path={self.shared / 'pictures'}", f"valid_dataset.path={self.shared / 'pictures'}",
            f"paths.cache={self.shared / 'cache'}", "cluster.n_gpus_per_node=1", "cluster.n_nodes=2",
            "slurm.cpus_per_node=4", "slurm.mem_per_node=4G", "slurm.time=30", "valid_dataset=null",
            *self.overrides,
        ]  # fmt: skip

    def launcher(self, *arguments: str, timeout: float = 100) -> Ended:
        extra = {"SLURM_CONF": self.cluster.environment["SLURM_CONF"], **self.env}
        done = subprocess.run(
            command(*arguments), cwd=self.where, env=environment(extra), capture_output=True, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip
        return Ended(done.returncode, done.stdout, done.stderr)

    def submit(self, *, emulate: bool = True) -> str:
        """The id of its job."""
        said = self.launcher("submit", *(["--emulate"] if emulate else []), "--json", *self.words).expect()
        return str(json.loads(said.out)["jobs"][0])

    def status(self) -> dict[str, Any]:
        return json.loads(self.launcher("status", str(self.root), "--json").expect().out)

    @property
    def state(self) -> State:
        found = read_state(self.run_dir)
        assert found is not None
        return found

    @property
    def steps(self) -> list[dict[str, Any]]:
        return steps(self.root)

    def requeues(self, leader: str) -> int:
        """That the job's script asked for."""
        said = self.root / "submitit" / f"{leader}.out"
        return said.read_text().count("is requeued\n") if said.exists() else 0

    def host_of(self, node: str) -> str:
        """Of its first attempt."""
        return str(json.loads((self.root / "logs" / "1" / "preflight" / f"{node}.json").read_text())["host"])

    def await_step(self, number: int, seconds: float = 90) -> None:
        self._until(lambda: self._goes_on() and len(self.steps) >= number, seconds, f"step {number} of {self.trial}")

    def await_attempt(self, number: int, seconds: float = 90) -> None:
        self._until(
            lambda: self._goes_on() and self.state.attempt >= number, seconds, f"attempt {number} of {self.trial}"
        )

    def _goes_on(self) -> bool:
        """An error of its own ends a run for good: no use to wait."""
        error = self.state.error
        assert error is None or error.process.startswith(("daemon of", "step of")), error
        return True

    def await_phase(self, *phases: str, seconds: float = 120) -> State:
        waits = lambda: "failed" in phases or self._goes_on()  # noqa: E731
        self._until(lambda: waits() and self.state.phase in phases, seconds, f"{self.trial} {phases}")
        return self.state

    def await_out_of_queue(self, seconds: float = 60) -> None:
        job = self.state.job_id
        self._until(
            lambda: not self.cluster.call("squeue", "-h", "-j", str(job), check=False), seconds, f"end of job {job}"
        )

    def _until(self, condition: Any, seconds: float, what: str) -> None:
        try:
            until(condition, seconds, what)
        except AssertionError:
            print(self.state, self.cluster.call("squeue", check=False), sep="\n")
            print(
                "\n".join(f"── {path}\n{path.read_text()[-1500:]}" for path in sorted(self.root.glob("submitit/*.out")))
            )
            print(log_tails(self.root, 1500))
            raise

    def nothing_left(self) -> None:
        until(lambda: processes_of(self.root) == [], 20, f"no process of {self.root}")


@pytest.fixture
def run(
    cluster: Cluster, shared: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    made: list[Run] = []

    def start(*overrides: str, name: str = "") -> Run:
        words = request.node.name.removeprefix("test_")
        trial = f"{words.partition('[')[0][:30]}-{hashlib.sha256(words.encode()).hexdigest()[:6]}{name}"
        made.append(Run(cluster, shared, trial, list(overrides)))
        return made[-1]

    yield start
    for each in made:
        state = read_state(each.run_dir)
        if state is not None and state.job_id:
            cluster.call("scancel", state.job_id, check=False)
