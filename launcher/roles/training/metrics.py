"""What the trainer reports: metrics.jsonl, TensorBoard, and the trainer service that others ask for progress.

Owns the record of a step and its estimate of the end; the numbers themselves come from the loops.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.tensorboard import SummaryWriter

from core.rpc.service import Service, serve_in_thread
from core.telemetry.files import append_line
from core.telemetry.phases import announce
from launcher.roles.arguments import RoleArguments, register

_REMEMBERED_STEPS = 20


class Record:
    """Written by rank 0 alone; on other ranks every call does nothing."""

    def __init__(self, arguments: RoleArguments, *, writes: bool, tensorboard: str | None = None) -> None:
        self.arguments = arguments
        self.progress: dict[str, Any] = {"step": 0, "version": 0, "phase": "starting", "eta_secs": None}
        self.total_steps = 0
        self._writes = writes
        self._recent: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._board = SummaryWriter(tensorboard or str(arguments.run_dir.tb)) if writes else None
        if writes:
            service = Service("trainer", arguments.run_dir.read_token(), status=self._status, metrics=self._metrics)
            register_as_trainer(arguments, serve_in_thread(service, arguments.host))

    def phase(self, name: str) -> None:
        """What the trainer is doing now, for /status and the watchdog."""
        self.progress["phase"] = name
        self.progress["since"] = time.time()
        announce(name.split(" for ")[0])

    def step(self, values: dict[str, Any]) -> None:
        """Appends the record of one step (kind step or sft)."""
        self._recent.append(values["secs"]["step"] if isinstance(values.get("secs"), dict) else values["secs"])
        left = max(0, self.total_steps - values["step"])
        eta = left * sum(self._recent) / len(self._recent)
        self.progress.update(step=values["step"], version=values.get("version", values["step"]), eta_secs=eta)
        memory = {"rss_mb": rss_mb(), **gpu_peak_mb()}
        self._append({**values, "time": time.time(), **memory, "eta_secs": eta})

    def event(self, values: dict[str, Any]) -> None:
        """Appends any other record (eval, note)."""
        self._append({"time": time.time(), **values})

    def note(self, level: str, message: str) -> None:
        """A line for the reader of the report, and for the log."""
        if self._writes:
            print(f"{level}: {message}", flush=True)
        self.event({"kind": "note", "level": level, "message": message})

    def position(self) -> int:
        """Bytes of metrics.jsonl so far."""
        path = self.arguments.run_dir.metrics
        return path.stat().st_size if path.exists() else 0

    def rewind(self, position: int) -> None:
        """Back to where a checkpoint found metrics.jsonl: what came behind it is told again, and is set aside."""
        if self._writes:
            set_aside(self.arguments.run_dir.metrics, position)

    def close(self) -> None:
        if self._board is not None:
            self._board.close()

    def _append(self, values: dict[str, Any]) -> None:
        if not self._writes:
            return
        append_line(self.arguments.run_dir.metrics, values)
        assert self._board is not None
        kind, step = values.get("kind"), values.get("step")
        if kind in ("step", "sft", "eval") and step is not None:
            prefix = values["name"] if kind == "eval" else kind
            for name, value in numbers(values).items():
                self._board.add_scalar(f"{prefix}/{name}", value, step)

    def _status(self) -> dict[str, Any]:
        doing = {"phase_secs": time.time() - self.progress["since"]} if "since" in self.progress else {}
        return {**self.progress, **doing, "total_steps": self.total_steps, "generation": self.arguments.generation}

    def _metrics(self) -> dict[str, float]:
        return {**numbers(self._status()), "rss_mb": rss_mb()}


def set_aside(metrics: Path, position: int) -> None:
    """Moves what is behind `position` to metrics.abandoned.jsonl."""
    if not metrics.exists() or metrics.stat().st_size <= position:
        return
    with metrics.open("rb") as file:
        file.seek(position)
        tail = file.read()
    with metrics.with_name("metrics.abandoned.jsonl").open("ab") as file:
        file.write(tail)
        file.flush()
        os.fsync(file.fileno())
    os.truncate(metrics, position)


def register_as_trainer(arguments: RoleArguments, url: str) -> None:
    """The registry knows the service as "trainer", the process as its rank."""
    register(RoleArguments(**{**vars(arguments), "name": "trainer"}), url)


def numbers(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record, nested ones by path."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix + name] = float(value)
    return found


def gpu_peak_mb() -> dict[str, float]:
    """The most that this process's tensors have taken since the last call."""
    if not torch.cuda.is_initialized():
        return {}
    most = torch.cuda.max_memory_allocated() / (1 << 20)
    torch.cuda.reset_peak_memory_stats()
    return {"gpu_peak_mb": most}


def rss_mb() -> float:
    """Resident memory of this process."""
    return psutil.Process().memory_info().rss / (1 << 20)
