"""Runs of the smoke configuration that are broken at one named phase, and what must be left of them.

A cell names a process, a phase, which time, and what happens to it there: killed (-9), stopped (SIGSTOP, past its
deadline) or cut off from the network. The process does it itself (core.telemetry.phases); a run that cannot mend itself
(its node daemon died) is resumed by the command that users type.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.runs import ROOT, Ended, await_gone, command, environment, lines, log_tails

STEPS = 3
DEADLINE = float(os.environ.get("CHAOS_DEADLINE", "5"))
MOVES = ("time", "secs", "eta_secs", "rss_mb", "restarts", "continuations", "sync", "sync_version", "gpu_peak_mb")
"""Of a metrics record: times, rates, memory, and counts of interruptions."""
CHECKS = ("parity_",)
"""Made by every start of the ranks, of whichever batch comes first then."""


@dataclass(frozen=True)
class Cell:
    process: str
    phase: str
    action: str
    number: int = 1
    ranks: int = 1
    deterministic: bool = True

    @property
    def name(self) -> str:
        mode = "" if self.deterministic else "-async"
        return f"{self.process}-{self.phase.replace(' ', '_')}-{self.number}-{self.action}{mode}"


@dataclass(frozen=True)
class Place:
    models: Path
    root: Path


def start(place: Place, trial: str, *overrides: str, fault: str = "", timeout: float = 170) -> tuple[Ended, Path]:
    return call(*words_of(place, trial, *overrides), fault=fault, timeout=timeout), place.root / "chaos" / trial


def words_of(place: Place, trial: str, *overrides: str) -> list[str]:
    """The smoke configuration with short deadlines, a checkpoint a step, and nothing outside of `place`."""
    return [
        "run", "--emulate", "configs/smoke.yaml", "experiment_name=chaos", f"trial_name={trial}",
        f"cluster.fileroot={place.root}", f"paths.cache={place.root / 'cache'}", f"actor.path={place.models / 'tiny'}",
        f"train_dataset.path={place.models / 'pictures'}", f"valid_dataset.path={place.models / 'pictures'}",
        "valid_dataset.dataset_kwargs.max_rows=4", f"total_train_steps={STEPS}", "recover.freq_steps=1",
        "recover.retries=6", f"rollout.server_deadline={DEADLINE}", f"deadlines.phase={DEADLINE}",
        f"deadlines.publishing={DEADLINE}", f"deadlines.saving={DEADLINE}", f"deadlines.pause={DEADLINE}",
        f"deadlines.load={DEADLINE}", f"deadlines.service={DEADLINE}", f"deadlines.daemon={2 * DEADLINE}",
        f"rollout.reward_timeout={DEADLINE}", "watchdog_secs=60", *overrides,
    ]  # fmt: skip


def call(*words: str, fault: str = "", timeout: float = 170) -> Ended:
    extra = {"VLM_RL_FAULT": fault} if fault else {}
    process = subprocess.Popen(
        command(*words),
        cwd=ROOT,
        env=environment(extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.terminate()  # an attached run ends all of its processes
        out, err = process.communicate(timeout=60)
        return Ended(124, out, f"{err}\nnot finished after {timeout} s")
    return Ended(process.returncode, out, err)


def mode(cell: Cell) -> list[str]:
    layout = [f"allocation_mode=embedded:d1+archon:d{cell.ranks}"]
    reward = ["reward=tests.chaos.breaking_reward:reward"] if cell.process == "reward-worker" else []
    synchronous = ["deterministic=true", "rollout.max_head_offpolicyness=0"] if cell.deterministic else []
    return [*layout, *reward, *synchronous]


def break_and_mend(place: Place, cell: Cell) -> Path:
    """Runs the cell to the end of training; fails with the logs where that does not come."""
    mark = place.root / f"{cell.name}.fault"
    fault = f"{cell.process}:{cell.phase}:{cell.number}:{cell.action}:{mark}"
    ended, run = start(place, cell.name, *mode(cell), fault=fault)
    assert mark.exists(), f"{cell.name}: the phase was never reached\n{ended.err[-2000:]}\n{log_tails(run)}"
    if ended.status != 0:
        assert cell.process.startswith("daemon"), f"{cell.name}: {ended.err[-4000:]}\n{log_tails(run)}"
        await_gone(run)
        ended = call("resume", str(run))
    assert ended.status == 0, f"{cell.name}: {ended.err[-4000:]}\n{log_tails(run)}"
    await_gone(run)
    if cell.process.startswith("rank-") and cell.action == "stop":
        check_named(run, cell)
    return run


def check_named(run: Path, cell: Cell) -> None:
    """The rank that was stuck, its phase, and where every thread of every rank stood."""
    said = (run / "logs" / "1" / "training-0" / "daemon.log").read_text()
    assert f"{cell.process} is stuck in phase " in said, said
    assert "its process is stopped (SIGSTOP)" in said, said
    for rank in range(cell.ranks):
        log = (run / "logs" / "1" / "training-0" / f"rank-{rank}.log").read_text()
        assert "most recent call first" in log, f"no stack of rank-{rank}:\n{log}"


def outcome(run: Path, last: int = STEPS) -> dict[str, Any]:
    """What may not depend on what happened on the way: weights, trained samples in order, metrics but times."""
    weights = hashlib.sha256()
    for path in sorted((run / "hub" / f"step-{last}").glob("*.safetensors")):
        weights.update(path.read_bytes())
    records = lines(run / "metrics.jsonl")
    return {
        "weights": weights.hexdigest(),
        "samples": lines(run / "rollouts" / "index.jsonl"),
        "metrics": [still(record) for record in records if record["kind"] != "note"],
    }


def still(record: Any) -> Any:
    if not isinstance(record, dict):
        return record
    return {
        key: still(value)
        for key, value in record.items()
        if key not in MOVES and not key.endswith("_secs") and not key.startswith(("tokens_per_s", *CHECKS))
    }


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    found = []
    for key in ("weights", "samples", "metrics"):
        if one[key] != other[key]:
            a, b = (json.dumps(each[key], indent=1, sort_keys=True).splitlines() for each in (one, other))
            shown = [f"  {x.strip()}  ≠  {y.strip()}" for x, y in zip(a, b, strict=False) if x != y][:12]
            found += [f"{key} ({len(a)} and {len(b)} lines):", *shown]
    return found
