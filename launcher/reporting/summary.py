"""A run in numbers: what `report --json` prints and the page is built from.

Owns sums and means over metrics.jsonl and void.jsonl; it reads the run directory and nothing else.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from core.telemetry.files import read_lines
from core.telemetry.metrics import Metrics, Record, read_metrics
from launcher.run_dir import RunDir

# curves of the page and of --json: field of a step record
CURVES = (
    "reward_mean",
    "reward_std",
    "accuracy",
    "staleness_mean",
    "staleness_max",
    "grad_norm",
    "entropy",
    "loss",
    "sync_secs",
    "tokens_per_s_rollout",
    "tokens_per_s_train",
)


def summarise(run_dir: RunDir) -> dict[str, Any]:
    """Every number is null where the run has not said it."""
    metrics = read_metrics(run_dir.metrics)
    state = _json(run_dir.state)
    written = _written(run_dir.config)
    records = metrics.steps or metrics.sft
    valid = metrics.evaluations.get("valid", [])
    return {
        "run": f"{run_dir.root.parent.name}/{run_dir.root.name}",
        "type": written.get("type", "rl"),
        "phase": state.get("phase"),
        "attempt": state.get("attempt"),
        "error": state.get("error"),
        "steps": records[-1]["step"] if records else 0,
        "first_eval_accuracy": valid[0].get("accuracy") if valid else None,
        "last_eval_accuracy": valid[-1].get("accuracy") if valid else None,
        "evaluations": metrics.evaluations,
        "reward_curve": curve(records, "reward_mean"),
        "accuracy_curve": curve(records, "accuracy"),
        "curves": {name: points for name in CURVES if (points := curve(records, name))},
        "secs": phase_secs(records),
        "wall_secs": _wall(records, state),
        "sync_secs": statistics(record.get("sync_secs") for record in _once_per_version(records)),
        "wait_rollout_secs": total(records, "wait_rollout_secs"),
        "wait_trainer_secs": total(records, "wait_trainer_secs"),
        "groups": total(records, "groups"),
        "samples": total(records, "samples"),
        "tokens": total(records, "tokens"),
        "tokens_per_s_rollout": mean(records, "tokens_per_s_rollout"),
        "tokens_per_s_train": mean(records, "tokens_per_s_train"),
        "staleness_max": max(_numbers(record.get("staleness_max") for record in records), default=None),
        "ratio_first_minibatch_max": max(_numbers(record.get("prox_ratio_max") for record in records), default=None),
        "truncated_fraction": mean(records, "truncated_fraction"),
        "equal_reward_groups": total(records, "equal_reward_groups"),
        "void": void_counts(run_dir, metrics),
        "void_examples": [_short(line) for line in read_lines(run_dir.void)[-20:]],
        "reward_errors": counts(records, "reward_errors"),
        "rss_mb": max(_numbers(record.get("rss_mb") for record in records), default=None),
        "notes": metrics.notes[-50:],
    }


def curve(records: Iterable[Record], name: str) -> list[tuple[int, float]]:
    return [(record["step"], record[name]) for record in records if _is_number(record.get(name))]


def phase_secs(records: Iterable[Record]) -> dict[str, float]:
    """Seconds of the run by phase of a step; `other` is what no phase claims of `step`."""
    sums: defaultdict[str, float] = defaultdict(float)
    for record in records:
        for name, value in _secs_of(record).items():
            if _is_number(value):
                sums[name] += value
    if "step" in sums:
        sums["other"] = max(0.0, sums["step"] - sum(value for name, value in sums.items() if name != "step"))
    return {name: round(value, 4) for name, value in sums.items()}


def _secs_of(record: Record) -> Record:
    """By phase; an SFT record says the whole as a number and its parts as `<phase>_secs`."""
    secs = record.get("secs")
    if isinstance(secs, dict):
        return secs
    parts = {name.removesuffix("_secs"): value for name, value in record.items() if name.endswith("_secs")}
    return {"step": secs, **{name: value for name, value in parts.items() if name not in ("eta", "sync")}}


def statistics(values: Iterable[object]) -> dict[str, float] | None:
    numbers = sorted(_numbers(values))
    if not numbers:
        return None
    return {
        "mean": round(sum(numbers) / len(numbers), 4),
        "median": round(numbers[len(numbers) // 2], 4),
        "max": round(numbers[-1], 4),
        "count": len(numbers),
    }


def void_counts(run_dir: RunDir, metrics: Metrics) -> dict[str, int]:
    """Groups left out, by reason. void.jsonl has every one; without it, what the steps counted."""
    lines = read_lines(run_dir.void)
    if lines:
        return dict(Counter(str(line.get("reason", "unknown")) for line in lines))
    return counts(metrics.steps, "void")


def counts(records: Iterable[Record], name: str) -> dict[str, int]:
    sums: Counter[str] = Counter()
    for record in records:
        found = record.get(name)
        for kind, count in found.items() if isinstance(found, dict) else ():
            if _is_number(count):
                sums[str(kind)] += count
    return dict(sums)


def total(records: Iterable[Record], name: str) -> float | None:
    numbers = _numbers(record.get(name) for record in records)
    return round(sum(numbers), 4) if numbers else None


def mean(records: Iterable[Record], name: str) -> float | None:
    numbers = _numbers(record.get(name) for record in records)
    return round(sum(numbers) / len(numbers), 4) if numbers else None


def _once_per_version(records: Iterable[Record]) -> list[Record]:
    """A sync that several steps report counts once."""
    seen: dict[object, Record] = {}
    for record in records:
        seen[record.get("sync_version", record.get("step"))] = record
    return list(seen.values())


def _wall(records: list[Record], state: Mapping[str, Any]) -> float | None:
    """From the launch of the last attempt to what its state last said; without it, from the first step to the last."""
    if _is_number(state.get("launched")) and state["launched"] > 0 and _is_number(state.get("updated")):
        return round(state["updated"] - state["launched"], 3)
    times = _numbers(record.get("time") for record in records)
    return round(times[-1] - times[0], 3) if len(times) > 1 else None


def _numbers(values: Iterable[object]) -> list[float]:
    return [float(value) for value in values if _is_number(value)]  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _short(line: Record) -> Record:
    return {key: value[:400] if isinstance(value, str) else value for key, value in line.items()}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _written(path: Path) -> dict[str, Any]:
    try:
        value = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}
