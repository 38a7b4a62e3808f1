"""What one task of a component does: makes its node ready, checks it, and becomes its node daemon.

The pickle that submitit carries holds a run directory and a partition's name and nothing else: attempt, nodes and
"latest" are read here, at the start. `python -P -m launcher.slurm.task RUN PARTITION` is for the templates in slurm/.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from core.config import Config, load
from launcher.node import __main__ as node_daemon
from launcher.node import orphan
from launcher.node.book import node_names
from launcher.node.state import read_state
from launcher.planning.layout import Plan
from launcher.run_dir import RunDir
from launcher.slurm import preflight
from launcher.slurm.interface import Interface, choose
from launcher.slurm.script import AGAIN_STATUS

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
CACHES = {
    "TMPDIR": "tmp",
    "XDG_CACHE_HOME": "cache",
    "TRITON_CACHE_DIR": "cache/triton",
    "TORCHINDUCTOR_CACHE_DIR": "cache/inductor",
    "VLLM_CACHE_ROOT": "cache/vllm",
    "FLASHINFER_WORKSPACE_BASE": "cache/flashinfer",
    "CUDA_CACHE_PATH": "cache/cuda",
}
"""Never in $HOME: it is shared, slow and small."""


class NodeFailed(Exception):
    """The node daemon ended badly; its log says why."""


class PreflightError(Exception):
    """A node is not fit; nothing was started."""


@dataclass(frozen=True)
class Place:
    """Where this task is: what Slurm and the batch script say."""

    partition: str
    node: int
    host: str
    attempt: int
    nodes: Mapping[str, list[str]]
    submit_host: str

    @property
    def name(self) -> str:
        return f"{self.partition}-{self.node}"


@dataclass(frozen=True)
class NodeTask:
    run: str
    partition: str

    def __call__(self) -> dict[str, object]:
        """The record of a daemon that ended with the run done; other ends are errors, or the status of a requeue."""
        run_dir = RunDir(Path(self.run))
        place = find_place(self.partition, os.environ)
        log = run_dir.log(place.attempt, place.partition, place.node, "daemon")
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        for stream in (1, 2):
            os.dup2(handle, stream)
        os.close(handle)
        status = serve(run_dir, place)
        state = read_state(run_dir)
        if status in (AGAIN_STATUS, orphan.STATUS):  # the batch script tells them apart
            sys.exit(status)
        if status != 0:
            raise NodeFailed(f"{place.name} on {place.host} ended with status {status}; see {log}")
        return {"node": place.name, "host": place.host, "attempt": place.attempt, "step": state.step if state else None}


def find_place(partition: str, environment: Mapping[str, str]) -> Place:
    nodes = {
        name: [each for each in environment.get(f"VLM_RL_{name.upper()}_NODES", "").split(",") if each]
        for name in ("inference", "training")
    }
    host = environment.get("SLURMD_NODENAME", "")
    mine = nodes[partition]
    index = mine.index(host) if host in mine else int(environment["SLURM_PROCID"])
    return Place(
        partition=partition,
        node=index,
        host=host or os.uname().nodename,
        attempt=int(environment["VLM_RL_ATTEMPT"]),
        nodes=nodes,
        submit_host=environment.get("SLURM_SUBMIT_HOST", ""),
    )


def serve(run_dir: RunDir, place: Place) -> int:
    config = load(run_dir.config, [])
    plan = Plan.from_json(run_dir.plan.read_text())
    for line in preflight.raise_limits():
        say(place, f"limit: {line}")
    scratch = scratch_directory(config, place)
    try:
        os.environ.update(surroundings(scratch))
        interface = find_interface(config, place)
        say(place, f"{interface.address} ({interface.name}): {interface.why}")
        check(config, run_dir, plan, place)
        words = ["--run-dir", str(run_dir.root), "--attempt", str(place.attempt)]
        words += ["--partition", place.partition, "--node", str(place.node)]
        words += ["--host", interface.address, "--interface", interface.name, "--on-cluster"]
        return node_daemon.main(words)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def check(config: Config, run_dir: RunDir, plan: Plan, place: Place) -> None:
    partition = plan.partition(place.partition)
    assert partition is not None
    asked_for = plan.device == "cuda" or config.slurm.of(place.partition).gpu_form != "none"
    planned = partition.nodes[place.node].gpus if asked_for else []
    mine = preflight.examine(run_dir, place.name, planned, plan.device)
    wait_secs = min(preflight.WAIT_SECS, config.rollout.setup_timeout)
    problems = preflight.check(run_dir, place.attempt, mine, node_names(plan), wait_secs)
    for line in problems:
        say(place, f"preflight: {line}")
    if problems:
        verdict = preflight.directory(run_dir, place.attempt) / "verdict"
        verdict.write_text("\n".join(problems) + "\n")
        raise PreflightError("\n".join(problems))
    say(place, "preflight: fit")


def find_interface(config: Config, place: Place) -> Interface:
    training = place.nodes["training"] or place.nodes["inference"]
    others = [*dict.fromkeys(each for names in place.nodes.values() for each in names), place.submit_host]
    return choose(
        config.slurm.interface, place.host, training[0] if training else place.host, [each for each in others if each]
    )


def scratch_directory(config: Config, place: Place) -> Path:
    """Node-local, for temporary files and compile caches; short, since unix sockets' names are."""
    bases = [config.paths.local, os.environ.get("SLURM_TMPDIR"), os.environ.get("TMPDIR"), "/tmp"]
    for base in bases:
        if base and os.access(base, os.W_OK):
            return Path(tempfile.mkdtemp(prefix=f"vlm-rl-{place.name}-", dir=base))
    return Path(tempfile.mkdtemp(prefix="vlm-rl-"))


def surroundings(scratch: Path) -> dict[str, str]:
    """Environment of everything below: node-local caches, and no proxy between our own processes."""
    for name in PROXIES:
        os.environ.pop(name, None)
    found = {name: str(scratch / part) for name, part in CACHES.items()}
    for path in found.values():
        Path(path).mkdir(parents=True, exist_ok=True)
    return {**found, "NO_PROXY": "*", "no_proxy": "*"}


def say(place: Place, text: str) -> None:
    sys.stderr.write(f"task of {place.name} on {place.host}: {text}\n")
    sys.stderr.flush()


def main(argv: list[str]) -> int:
    run, partition = argv
    try:
        NodeTask(run, partition)()
    except (NodeFailed, PreflightError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
