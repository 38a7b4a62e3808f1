"""metrics.jsonl, read: what each step and each evaluation of a run said.

Owns the order of records (after a restart a step may be there twice: the later one counts) and reading no line twice.
Writing is append_line's; what the numbers mean is their writer's.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]


@dataclass
class Metrics:
    """Everything read so far."""

    by_step: dict[int, Record] = field(default_factory=dict)
    by_sft_step: dict[int, Record] = field(default_factory=dict)
    by_evaluation: dict[tuple[str, int], Record] = field(default_factory=dict)
    notes: list[Record] = field(default_factory=list)

    def add(self, record: Record) -> None:
        step = record.get("step")
        match record.get("kind"):
            case "step" if isinstance(step, int):
                self._forget_after(self.by_step, step)
                self.by_step[step] = record
            case "sft" if isinstance(step, int):
                self._forget_after(self.by_sft_step, step)
                self.by_sft_step[step] = record
            case "eval" if isinstance(step, int):
                self.by_evaluation[str(record.get("name", "valid")), step] = record
            case "note":
                self.notes.append(record)

    @staticmethod
    def _forget_after(records: dict[int, Record], step: int) -> None:
        """A run that went back to `step` does not have the later steps any more."""
        for later in [known for known in records if known > step]:
            del records[later]

    @property
    def steps(self) -> list[Record]:
        return [self.by_step[step] for step in sorted(self.by_step)]

    @property
    def sft(self) -> list[Record]:
        return [self.by_sft_step[step] for step in sorted(self.by_sft_step)]

    @property
    def last_step(self) -> int:
        """0 before the first."""
        return max([*self.by_step, *self.by_sft_step], default=0)

    @property
    def evaluations(self) -> dict[str, list[Record]]:
        """By name of the evaluated split, in order of steps."""
        found: dict[str, list[Record]] = {}
        for name, step in sorted(self.by_evaluation):
            found.setdefault(name, []).append(self.by_evaluation[name, step])
        return found


class MetricsReader:
    """Reads what was appended since the last look; a line that is not whole yet waits for its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = Metrics()
        self._position = 0
        self._last_time = 0.0

    def poll(self) -> list[Record]:
        """The new records, which `metrics` has afterwards."""
        try:
            with self.path.open("rb") as file:
                shorter = file.seek(0, 2) < self._position  # ranks that restarted set aside what they tell again
                self._position = file.seek(0 if shorter else self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._position += end
        records = [record for line in data[:end].split(b"\n") if (record := _parsed(line)) is not None]
        if shorter:
            records = [record for record in records if record.get("time", 0.0) > self._last_time]
        self._last_time = max([self._last_time, *(record.get("time", 0.0) for record in records)])
        for record in records:
            self.metrics.add(record)
        return records


def _parsed(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    # what nobody of ours wrote is left out, as a torn line is
    whole = isinstance(record.get("time", 0.0), int | float) and not isinstance(record.get("secs"), list | str)
    return record if whole else None


def read_metrics(path: Path) -> Metrics:
    reader = MetricsReader(path)
    reader.poll()
    return reader.metrics
