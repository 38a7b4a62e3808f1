"""What `run` shows while it is attached: a table that changes in a terminal, one line a step elsewhere.

Owns the words and the layout; numbers come from metrics.jsonl and the phase from the status it is given. It waits for
nothing and starts nothing: its caller looks in a loop.
"""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from core.telemetry.metrics import Metrics, MetricsReader, Record
from launcher.run_dir import RunDir

NONE = "–"
WARN_STEPS = 10
_BARS = "▁▂▃▄▅▆▇█"


class LiveView:
    """One run, looked at again and again: metrics.jsonl is read on from where the last look ended."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self._reader = MetricsReader(run_dir.metrics)
        self._warned: int | None = None

    def skip_old(self) -> None:
        """What earlier attempts wrote is shown in the curves, and not as lines again."""
        self._reader.poll()

    def renderable(self, status: Mapping[str, Any] | None) -> RenderableType:
        """For rich.live.Live, in a terminal."""
        self._reader.poll()
        return table(self.run_dir, self._reader.metrics, status or {})

    def new_lines(self) -> list[str]:
        """One line for each step, evaluation and note since the last look, for output that is not a terminal."""
        lines = []
        for record in self._reader.poll():
            lines += [line for line in (plain_line(record), self._no_signal(record)) if line]
        return lines

    def _no_signal(self, record: Record) -> str | None:
        """A warning of a step that taught nothing, at most once in WARN_STEPS."""
        step, said = record.get("step"), no_signal(record)
        if not said or not isinstance(step, int) or (self._warned is not None and step - self._warned < WARN_STEPS):
            return None
        self._warned = step
        return f"warning: step {step}: {said}"


def no_signal(record: Record) -> str:
    """Says of a step that no group of it had answers of different reward; else empty."""
    groups = record.get("groups")
    if record.get("kind") != "step" or not groups or record.get("equal_reward_groups") != groups:
        return ""
    return f"equal rewards within each of its {groups} groups: a reward_norm by group leaves nothing to learn from"


def render(run_dir: RunDir, status: Mapping[str, Any] | None) -> RenderableType:
    """One look at a run."""
    return LiveView(run_dir).renderable(status)


def table(run_dir: RunDir, metrics: Metrics, status: Mapping[str, Any]) -> RenderableType:
    rows = _sft_rows(metrics) if metrics.sft and not metrics.steps else _step_rows(metrics)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", justify="right")
    grid.add_column()
    for name, value in rows:
        grid.add_row(name, Text(value))
    title = Text(f"{run_dir.root.parent.name}/{run_dir.root.name}", style="bold")
    title.append(
        f"  {status.get('phase') or 'starting'}", style="green" if status.get("phase") == "running" else "yellow"
    )
    if status.get("attempt"):
        title.append(f"  attempt {status['attempt']}", style="dim")
    parts: list[RenderableType] = [title, grid]
    error = status.get("error")
    if error:
        text = f"{error.get('process', '')}: {error.get('message', '')}" if isinstance(error, Mapping) else str(error)
        parts.append(Text(text, style="red"))
    if metrics.notes:
        parts.append(Text(str(metrics.notes[-1].get("message", "")), style="yellow"))
    return Group(*parts)


def _step_rows(metrics: Metrics) -> list[tuple[str, str]]:
    steps = metrics.steps
    last: Record = steps[-1] if steps else {}
    secs = last.get("secs") or {}
    rows = [
        ("step", f"{number(last.get('step'), 0)}   version {number(last.get('version'), 0)}"),
        ("reward", f"{number(last.get('reward_mean'))}  {spark([s.get('reward_mean') for s in steps])}"),
        ("accuracy", f"{number(last.get('accuracy'))}  {spark([s.get('accuracy') for s in steps])}"),
        ("held out", _evaluations(metrics)),
        ("staleness", f"mean {number(last.get('staleness_mean'), 2)}  max {number(last.get('staleness_max'), 0)}"),
        (
            "tokens/s",
            f"sampled {number(last.get('tokens_per_s_rollout'), 0)}  "
            f"trained {number(last.get('tokens_per_s_train'), 0)}",
        ),
        (
            "waiting",
            f"trainer {number(last.get('wait_rollout_secs', secs.get('wait_batch')), 2)} s for answers  "
            f"servers {number(last.get('wait_trainer_secs'), 2)} s for the trainer",
        ),
        ("weight sync", f"{number(last.get('sync_secs'), 2)} s to version {number(last.get('sync_version'), 0)}"),
        ("step takes", f"{number(secs.get('step'), 2)} s"),
        ("ETA", duration(last.get("eta_secs"))),
    ]
    lost = {**(last.get("void") or {}), **(last.get("reward_errors") or {})}
    if no_signal(last):
        rows.append(("no signal", no_signal(last)))
    if lost:
        rows.append(("lost", ", ".join(f"{name} {count}" for name, count in sorted(lost.items()))))
    return rows


def _sft_rows(metrics: Metrics) -> list[tuple[str, str]]:
    last = metrics.sft[-1]
    return [
        ("step", f"{number(last.get('step'), 0)}   {last.get('phase') or ''}"),
        ("loss", f"{number(last.get('loss'))}  {spark([record.get('loss') for record in metrics.sft])}"),
        ("held out", _evaluations(metrics)),
        ("lr", number(last.get("lr"), 8)),
        ("tokens/s", number(last.get("tokens_per_s_train"), 0)),
        ("ETA", duration(last.get("eta_secs"))),
    ]


def _evaluations(metrics: Metrics) -> str:
    shown = [
        f"{name} {number(records[-1].get('accuracy'))} at step {records[-1].get('step')}"
        for name, records in metrics.evaluations.items()
    ]
    return "  ".join(shown) or NONE


def plain_line(record: Record) -> str | None:
    """One record as one line, or None for what is not shown."""
    match record.get("kind"):
        case "step":
            parts = [
                f"step {record.get('step')}",
                f"reward {number(record.get('reward_mean'))}",
                f"accuracy {number(record.get('accuracy'))}",
                f"staleness {number(record.get('staleness_mean'), 2)}",
                f"tok/s {number(record.get('tokens_per_s_rollout'), 0)} sampled "
                f"{number(record.get('tokens_per_s_train'), 0)} trained",
                f"waited {number(record.get('wait_rollout_secs'), 2)} s for answers "
                f"{number(record.get('wait_trainer_secs'), 2)} s for the trainer",
                f"sync {number(record.get('sync_secs'), 2)} s",
                f"{number((record.get('secs') or {}).get('step'), 2)} s",
                f"ETA {duration(record.get('eta_secs'))}",
            ]
            return " · ".join(parts)
        case "sft":
            return (
                f"step {record.get('step')} · {record.get('phase') or 'sft'} · loss {number(record.get('loss'))} · "
                f"tok/s {number(record.get('tokens_per_s_train'), 0)}"
            )
        case "eval":
            # rows without an answer count as wrong: said, since accuracy falls by them
            failed = f" ({record['failed']} of them failed)" if record.get("failed") else ""
            return (
                f"evaluation {record.get('name', 'valid')} at step {record.get('step')}: accuracy "
                f"{number(record.get('accuracy'))} over {record.get('rows', NONE)} rows{failed}, versions "
                f"{record.get('version_min', NONE)}–{record.get('version_max', NONE)}, "
                f"{number(record.get('secs'), 1)} s"
            )
        case "note":
            return f"{record.get('level', 'note')}: {record.get('message', '')}"
    return None


def number(value: object, digits: int = 3) -> str:
    """A number in few characters; a dash for what is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return NONE
    text = f"{value:,.{digits}f}"
    return f"{value:.1e}" if digits > 2 and value and float(text.replace(",", "")) == 0 else text


def duration(secs: object) -> str:
    if isinstance(secs, bool) or not isinstance(secs, int | float) or not 0 <= secs < 1e9:
        return NONE
    minutes, seconds = divmod(round(secs), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes:02d}m" if hours else f"{minutes}m {seconds:02d}s" if minutes else f"{seconds}s"


def spark(values: list[object], width: int = 40) -> str:
    """The curve of the last values in block characters."""
    numbers = [float(v) for v in values if isinstance(v, int | float) and v == v]
    if len(numbers) < 2:
        return ""
    groups = min(width, len(numbers))
    means = []
    for i in range(groups):
        part = numbers[i * len(numbers) // groups : (i + 1) * len(numbers) // groups]
        means.append(sum(part) / len(part))
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(_BARS[round((mean - low) / span * (len(_BARS) - 1))] for mean in means)
