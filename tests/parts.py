"""The parts of `make test`, in fail-fast order, with the seconds each took.

Owns the order and the clock; what a part checks lives in its folder under tests/.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "ip")
UNIT = ("config", "cli", "docs", "plan", "rpc", "report", "rl", "slurm")
SOURCES = ["launcher", "core", "models", "tests", "bench"]


@dataclass(frozen=True)
class Part:
    """One part: commands run one after the other; `needs` names programs without which it is left out by name."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    minutes: float
    full: bool = False
    needs: tuple[str, ...] = field(default=())
    root: bool = False


def pytest_command(*arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "pytest", *arguments)


PARTS = (
    Part(
        "lint",
        (
            (sys.executable, "-m", "ruff", "check", *SOURCES),
            (sys.executable, "-m", "ruff", "format", "--check", *SOURCES),
            (sys.executable, "-m", "mypy", "launcher", "core", "models"),
            pytest_command("tests/test_imports.py"),
        ),
        5,
    ),
    Part(
        "unit",
        (pytest_command("-n", "2", *[f"tests/{area}" for area in UNIT]),),
        12,
    ),
    Part("data", (pytest_command("-n", "2", "tests/data", "tests/weights"),), 8),
    Part("model parity", (pytest_command("-n", "2", "tests/model"),), 10),
    Part("layouts", (pytest_command("tests/parallel"),), 15),
    Part("engine", (pytest_command("-n", "2", "tests/engine"),), 10),
    Part("inference and rollout", (pytest_command("tests/embedded", "tests/rollout", "tests/rewards"),), 15),
    Part("processes", (pytest_command("-n", "2", "tests/node"),), 15),
    Part(
        "servers",
        (
            (sys.executable, "-m", "launcher", "install", "vllm", "--device", "cpu"),
            (sys.executable, "-m", "launcher", "install", "sglang", "--device", "cpu"),
            pytest_command("tests/servers/test_contract.py"),
            pytest_command("tests/servers", "--ignore=tests/servers/test_contract.py"),
        ),
        20,
    ),
    Part(
        "slurm",
        # three clusters side by side: most of the time is Slurm's own waiting
        (pytest_command("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "tests/slurm_cluster"),),
        15,
        needs=CLUSTER,
        root=True,
    ),
    Part(
        "sixteen daemons",  # alone, since it is timed
        (pytest_command("-m", "slow", "-s", "tests/slurm_cluster/test_sixteen.py"),),
        8,
        needs=("ip", "nsenter"),
        root=True,
    ),
    Part("end to end", (pytest_command("tests/e2e"),), 20),
    Part("reliability", (pytest_command("-n", "2", "tests/reliability", "tests/fuzz"),), 15),
    Part("security", (pytest_command("tests/security"),), 5),
    Part("chaos", (pytest_command("tests/chaos"),), 15),
    Part("soak", ((sys.executable, "-m", "bench.soak", "--minutes", "3"),), 8),
    Part("quickstart", ((sys.executable, "-m", "bench.quickstart", "--check"),), 15),
    Part(
        "quickstart, three seeds",
        ((sys.executable, "-m", "bench.quickstart", "--seeds", "0", "1", "2", "--check"),),
        45,
        full=True,
    ),
    Part(
        "quickstart, real servers",
        ((sys.executable, "-m", "bench.quickstart_servers", "--check"),),
        60,
        full=True,
    ),
    Part(
        "weight sync",
        ((sys.executable, "-m", "bench.weight_sync", "--megabytes", "10", "100", "500", "2000", "--check"),),
        15,
        full=True,
    ),
    Part("asynchrony", ((sys.executable, "bench/async.py", "--check"),), 15, full=True),
    Part(
        "quickstart as a hetjob",
        (pytest_command("-m", "slow", "tests/slurm_cluster"),),
        60,
        full=True,
        needs=CLUSTER,
        root=True,
    ),
    Part("every chaos cell", ((sys.executable, "-m", "tests.chaos"),), 90, full=True),
    Part(
        "long forms",
        (pytest_command("-m", "slow", "tests", "--ignore=tests/slurm_cluster", "--ignore=tests/chaos"),),
        40,
        full=True,
    ),
)


def run(part: Part) -> bool:
    """Runs one part; True when every command of it succeeded within its minutes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    for command in part.commands:
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment, timeout=part.minutes * 60, check=False)
        except subprocess.TimeoutExpired:
            print(f"part {part.name}: not finished after {part.minutes} minutes: {' '.join(command)}", flush=True)
            return False
        if done.returncode != 0:
            print(f"part {part.name}: exit {done.returncode}: {' '.join(command)}", flush=True)
            return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="runs the parts of the test suite in fail-fast order")
    parser.add_argument("--full", action="store_true", help="the long forms too")
    parser.add_argument("--only", nargs="*", help="just these parts")
    arguments = parser.parse_args()
    seconds: dict[str, float] = {}
    failed = False
    for part in PARTS:
        if (part.full and not arguments.full) or (arguments.only and part.name not in arguments.only):
            continue
        missing = [program for program in part.needs if shutil.which(program) is None]
        missing += ["root"] if part.root and os.geteuid() != 0 else []
        if missing:
            print(f"part {part.name}: left out, {', '.join(missing)} not on this machine", flush=True)
            if os.environ.get("CI") == "true":
                return 1
            continue
        print(f"── {part.name}", flush=True)
        start = time.monotonic()
        failed = not run(part)
        seconds[part.name] = time.monotonic() - start
        if failed:
            break
    for name, took in seconds.items():
        print(f"{took:8.1f} s  {name}")
    print(f"{sum(seconds.values()):8.1f} s  in all")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
