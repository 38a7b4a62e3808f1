"""The quickstart: three commands, printed and run; --seeds: the same per seed; --check: held to their numbers.

Owns the order of the commands and the thresholds of the README's table; what the runs did is read from `report --json`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path("runs")
GAIN, FINAL, BLIND, RISING_STEPS = 0.25, 0.80, 0.30, 20


@dataclass(frozen=True)
class Trial:
    """One seed's paths: the fresh model, the run that teaches it and the run that trains it."""

    seed: int
    name: str

    @property
    def model(self) -> Path:
        return RUNS / "models" / (f"quickstart-{self.name}")

    @property
    def pictures(self) -> Path:
        return RUNS / "models" / "pictures"

    def commands(self) -> list[list[str]]:
        launcher = [sys.executable, "-m", "launcher"]
        pictures = str(self.pictures)
        same = [f"seed={self.seed}", f"trial_name={self.name}"]
        return [
            [*launcher, "make-model", str(self.model), "--untied", "--seed", str(self.seed), "--pictures", pictures],
            [*launcher, "run", "--emulate", "configs/quickstart_sft.yaml", *same, f"actor.path={self.model}"],
            [*launcher, "run", "--emulate", "configs/quickstart.yaml", *same],
        ]


def free_name(wanted: str) -> str:
    """The wanted trial name, or with a number behind it where such a run exists already."""
    taken = {path.name for path in RUNS.glob("quickstart*/*")}
    names = [wanted, *(f"{wanted}-{n}" for n in range(2, 1000))]
    return next(name for name in names if name not in taken)


def run_trial(trial: Trial) -> None:
    for command in trial.commands():
        print("$ python " + shlex.join(command[1:]), flush=True)
        start = time.monotonic()
        subprocess.run(command, cwd=ROOT, check=True, timeout=1800)
        print(f"  ({time.monotonic() - start:.0f} s)", flush=True)


def summary(run: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "report", run, "--json"],
        cwd=ROOT, check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return json.loads(done.stdout)


def tower(directory: Path) -> dict[str, np.ndarray]:
    shards = (load_file(path) for path in directory.glob("*.safetensors"))
    return {name: value for shard in shards for name, value in shard.items() if name.startswith("visual.")}


def tower_changed(trial: Trial) -> bool:
    """Whether every tensor of the vision tower differs between what GRPO started from and what it ended with."""
    before = tower(RUNS / "quickstart-sft" / trial.name / "hub" / "latest")
    after = tower(RUNS / "quickstart" / trial.name / "hub" / "latest")
    return before.keys() == after.keys() and not any(np.array_equal(before[name], after[name]) for name in before)


def shortfalls(trial: Trial, report: dict) -> list[str]:
    """What of the README's table this run does not reach; empty when all of it is there."""
    evals = {name: report["evaluations"][name] for name in ("valid", "valid-shuffled")}
    first, last = evals["valid"][0]["accuracy"], evals["valid"][-1]["accuracy"]
    blind = evals["valid-shuffled"][-1]["accuracy"]
    found = []
    if last - first < GAIN:
        found.append(f"held-out accuracy rose by {last - first:.3f} only ({first:.3f} to {last:.3f})")
    if last < FINAL:
        found.append(f"held-out accuracy is {last:.3f} at the end")
    if blind > BLIND:
        found.append(f"with shuffled pictures it is still {blind:.3f}: the model does not look")
    if not tower_changed(trial):
        found.append("a weight of the vision tower did not change")
    if report["steps"] < RISING_STEPS:
        found.append(f"{report['steps']} steps only")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="make-model, SFT, GRPO; on two cores in minutes")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1])
    parser.add_argument("--check", action="store_true", help="exit 1 where a seed misses a number")
    arguments = parser.parse_args()
    missed = False
    for seed in arguments.seeds:
        trial = Trial(seed, free_name("first" if arguments.seeds == [1] else f"seed{seed}"))
        start = time.monotonic()
        run_trial(trial)
        report = summary(f"runs/quickstart/{trial.name}")
        found = shortfalls(trial, report)
        missed = missed or bool(found)
        valid = report["evaluations"]["valid"]
        print(
            f"seed {seed}: {valid[0]['accuracy']:.3f} → {valid[-1]['accuracy']:.3f} held out, "
            f"{report['evaluations']['valid-shuffled'][-1]['accuracy']:.3f} with shuffled pictures, "
            f"{report['steps']} steps, {time.monotonic() - start:.0f} s" + "".join(f"\n  ✗ {line}" for line in found),
            flush=True,
        )
    return int(arguments.check and missed)


if __name__ == "__main__":
    sys.exit(main())
