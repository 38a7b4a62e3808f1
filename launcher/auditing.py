"""Was every prompt trained exactly once? Judged from what a run wrote, with nothing running.

*Trained once*: every (epoch, position) that the cursor has passed is in exactly one logged batch of the surviving
lineage, or in void with its reason, or in the tail that drop_last leaves. Owns the judgement, values to values but for
reading the files; `audit` prints it.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.config import Config, load
from core.rl.trajectory import TrajectoryError, decode_samples
from core.telemetry.files import read_lines
from core.telemetry.metrics import read_metrics
from launcher.damaged import checked_lines
from launcher.run_dir import RunDir

Line = dict[str, Any]
Place = tuple[int, int]
INDEX_NUMBERS = ("batch", "epoch", "position", "started_version", "version_min", "version_max")
_SHOWN = 5


@dataclass
class Audit:
    """`problems` is empty for a run that trained everything once."""

    batches: int = 0
    groups: int = 0
    void: int = 0
    starts: int = 0
    staleness_max: int = 0
    kept_batches: int = 0
    problems: list[str] = field(default_factory=list)


def audit(run_dir: RunDir) -> Audit:
    config = load(run_dir.config, [])
    found = Audit()
    if config.type == "rl":
        starts = checked_lines(run_dir.index.with_name("starts.jsonl"), ("index_lines", "behind"))
        lines = surviving(checked_lines(run_dir.index, INDEX_NUMBERS), starts)
        void = checked_lines(run_dir.void, ("epoch", "position"))
        found.batches, found.groups = max((line["batch"] for line in lines), default=0), len(lines)
        found.void, found.starts = len(void), len(starts)
        found.staleness_max = max((line["batch"] - 1 - line["started_version"] for line in lines), default=0)
        found.problems += [*judge_batches(lines, config), *judge_places(lines, void, config)]
        found.problems += [*judge_versions(lines, starts, config.rollout.max_head_offpolicyness)]
        found.problems += [*judge_kept(run_dir, lines, config.gconfig.n_samples)]
        found.kept_batches = len(list(run_dir.batches.glob("[0-9]*.safetensors")))
    found.problems += [*judge_steps(run_dir, found.batches if config.type == "rl" else None)]
    found.problems += [*judge_lineage(run_dir)]
    return found


def surviving(lines: Sequence[Line], starts: Sequence[Line]) -> list[Line]:
    """Without the lines of batches that a later start formed anew, in batch order."""
    kept: list[Line] = []
    ends = [*(start["index_lines"] for start in starts), len(lines)]
    begin = 0
    for number, end in enumerate(ends):
        kept += lines[begin:end]
        if number < len(starts):
            kept = [line for line in kept if line["batch"] <= starts[number]["behind"]]
        begin = max(begin, end)
    return sorted(kept, key=lambda line: line["batch"])


def judge_batches(lines: Sequence[Line], config: Config) -> Iterator[str]:
    sizes = Counter(line["batch"] for line in lines)
    missing = [batch for batch in range(1, max(sizes, default=0) + 1) if batch not in sizes]
    if missing:
        yield f"batches {_some(missing)} are missing from the index"
    wanted = config.train_dataset.batch_size
    last = max(sizes, default=0)
    for batch, size in sorted(sizes.items()):
        short_tail = batch == last and not config.train_dataset.drop_last and size < wanted
        if size != wanted and not short_tail:
            yield f"batch {batch} has {size} groups, not {wanted}"


def judge_places(lines: Sequence[Line], void: Sequence[Line], config: Config) -> Iterator[str]:
    batches_of: dict[Place, list[int]] = {}
    for line in lines:
        batches_of.setdefault((line["epoch"], line["position"]), []).append(line["batch"])
    for place, batches in sorted(batches_of.items()):
        if len(batches) > 1:
            yield f"{_named(place)} is in batches {', '.join(map(str, batches))}"
    given_up = Counter((line["epoch"], line["position"]) for line in void)
    for place, count in sorted(given_up.items()):
        if place in batches_of:
            yield f"{_named(place)} is void and in batch {batches_of[place][0]}"
        if count > 1:
            yield f"{_named(place)} is void {count} times"
    for line in void:
        if not line.get("reason"):
            yield f"{_named((line['epoch'], line['position']))} is void without a reason"
    order = [(line["epoch"], line["position"]) for line in lines]
    backward = [after for before, after in itertools.pairwise(order) if after <= before]
    if backward:
        yield f"not in admission order: {_some([_named(place) for place in backward])}"
    yield from _judge_gaps(set(batches_of), set(given_up), config)


def _judge_gaps(trained: set[Place], given_up: set[Place], config: Config) -> Iterator[str]:
    """Every place before the last trained one is trained or void, up to the end of each epoch."""
    if not trained:
        return
    last_epoch, last_position = max(trained)
    whole = trained | {place for place in given_up if place < (last_epoch, last_position)}
    lengths = [
        max(p for e, p in whole if e == epoch) + 1 for epoch in range(last_epoch) if any(e == epoch for e, _ in whole)
    ]
    length = max(lengths, default=last_position + 1)
    for epoch in range(last_epoch + 1):
        end = length if epoch < last_epoch else last_position + 1
        gaps = [(epoch, position) for position in range(end) if (epoch, position) not in whole]
        if gaps:
            yield f"{_some([_named(place) for place in gaps])} were passed, but are in no batch and not void"
    if lengths and config.train_dataset.drop_last and length % config.train_dataset.batch_size:
        yield f"an epoch of {length} places is no whole number of batches, although drop_last is set"


def judge_versions(lines: Sequence[Line], starts: Sequence[Line], bound: int) -> Iterator[str]:
    behind = {start["behind"] for start in starts}
    newest = -1
    batch = 0
    for line in lines:
        age = line["batch"] - 1 - line["started_version"]
        name = f"batch {line['batch']}, {_named((line['epoch'], line['position']))}"
        if not 0 <= age <= bound:
            yield f"{name}: staleness {age} is not within 0 to {bound}"
        if not line["started_version"] <= line["version_min"] <= line["version_max"] <= line["batch"] - 1:
            yield (
                f"{name}: started with version {line['started_version']}, its tokens with {line['version_min']} to "
                f"{line['version_max']}, and trained at {line['batch'] - 1}"
            )
        if line["batch"] != batch and line["batch"] - 1 in behind:
            newest = -1  # a trainer that went back publishes its older version again
        if line["started_version"] < newest:
            yield f"{name}: started with version {line['started_version']} after a group that had {newest}"
        newest, batch = max(newest, line["started_version"]), line["batch"]


def judge_kept(run_dir: RunDir, lines: Sequence[Line], n_samples: int) -> Iterator[str]:
    """The batches that are still there hold what the index says of them."""
    ids: dict[int, list[str]] = {}
    for line in lines:
        ids.setdefault(line["batch"], []).append(str(line.get("group_id")))
    for path in sorted(run_dir.batches.glob("[0-9]*.safetensors")):
        try:
            samples, _ = decode_samples(path.read_bytes())
        except (OSError, TrajectoryError) as error:
            yield f"{path.name} cannot be read: {error}"
            continue
        groups = Counter(sample.group_id for sample in samples)
        if list(groups) != ids.get(int(path.stem), []):
            yield f"{path.name} holds groups {_some(list(groups))}, the index says {_some(ids.get(int(path.stem), []))}"
        if any(count != n_samples for count in groups.values()):
            yield f"{path.name}: a group has not {n_samples} samples"
        for sample in samples:
            if any(after < before for before, after in itertools.pairwise(sample.versions)):
                yield f"{path.name}, sample {sample.sample_id}: its versions go back"


def judge_steps(run_dir: RunDir, batches: int | None) -> Iterator[str]:
    """Each step of the surviving lineage is recorded once, without a gap."""
    records = [record for record in read_lines(run_dir.metrics) if record.get("kind") in ("step", "sft")]
    metrics = read_metrics(run_dir.metrics)
    steps = [record["step"] for record in (metrics.steps or metrics.sft)]
    if steps != list(range(1, len(steps) + 1)):
        yield f"metrics.jsonl does not have steps 1 to {len(steps)}, but {_some(steps)}"
    twice = [step for step, count in Counter(record.get("step") for record in records).items() if count > 1]
    if twice:
        yield f"steps {_some(sorted(twice, key=str))} are recorded more than once"
    if batches is not None and steps and steps[-1] > batches:
        yield f"step {steps[-1]} was trained, but only {batches} batches were logged"


def judge_lineage(run_dir: RunDir) -> Iterator[str]:
    """A checkpoint descends from generations in their order."""
    for path in sorted(run_dir.checkpoints.glob("step-*/state.json")):
        try:
            lineage = [
                (int(version), int(generation)) for version, generation in json.loads(path.read_text())["lineage"]
            ]
        except (OSError, ValueError, KeyError) as error:
            yield f"{path.parent.name}: its state cannot be read ({type(error).__name__}: {error})"
            continue
        if lineage != sorted(lineage) or len({generation for _, generation in lineage}) != len(lineage):
            yield f"{path.parent.name}: lineage {lineage} goes back"


def _named(place: Place) -> str:
    return f"epoch {place[0]} position {place[1]}"


def _some(items: Sequence[Any]) -> str:
    shown = ", ".join(str(item) for item in items[:_SHOWN])
    return shown + (f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else "")
