"""Where training stands, saved and found again: the trainer is the only authority on progress.

Owns the state that goes with a checkpoint, when one is due, the thread that writes it beside training, and what is
saved when the run is asked to stop; the files are core.engine.checkpoint's.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from core.engine import checkpoint
from core.engine.checkpoint import Staged
from launcher.fixed import differences, fixed_values
from launcher.roles.training.exchange import gather_over
from launcher.roles.training.metrics import Record
from launcher.roles.training.periodic import Periodic
from launcher.roles.training.setup import Session

DEFAULT_FREQ_SECS = 600
Lineage = list[tuple[int, int]]


class ConfigChangedError(Exception):
    """The configuration differs from the checkpoint's in what cannot change within a run."""


@dataclass
class Progress:
    """What a checkpoint says besides weights and moments."""

    step: int = 0
    lineage: Lineage = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)  # sft: place in the data, phase
    bad_steps: int = 0  # in a row, up to `step`
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # asked for and not finished
    has_images: bool = False  # some batch had


class Recovery:
    """Checkpoints of one run; collective. One at a time is written, in a thread, over a process group of its own."""

    def __init__(self, session: Session, record: Record, steps_per_epoch: int, timers: dict[str, Periodic]) -> None:
        self.session = session
        self.record = record
        self.root = session.arguments.run_dir.checkpoints
        recover = session.config.recover
        self.enabled = recover.mode in ("on", "auto")
        self.periodic = Periodic(recover, steps_per_epoch)
        if not self.periodic.ever:
            self.periodic.freq_secs = DEFAULT_FREQ_SECS
        self.timers = {"recover": self.periodic, **timers}
        self.saved_step: int | None = None
        self.save_secs: float | None = None
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: tuple[int, Future[float]] | None = None

    def load(self) -> tuple[Progress, list[str]]:
        """The newest whole checkpoint into the engine, or the beginning; with warnings about broken ones."""
        loaded = checkpoint.load(self.root, self.session.engine, gather=self.session.exchange.gather)
        if loaded is None:
            self.record.rewind(0)
            return Progress(), []
        state = loaded.state
        changed = differences(state.get("config", {}), fixed_values(self.session.config))
        if changed:
            raise ConfigChangedError(
                f"{self.root}/step-{loaded.step} was trained with another configuration, and what differs cannot "
                f"change within a run: {'; '.join(changed)}"
            )
        rngs = state["rng"]
        if len(rngs) == self.session.mesh.size:
            set_rng(rngs[self.session.mesh.rank])
        for name, secs in state.get("clocks", {}).items():
            if name in self.timers:
                self.timers[name].set_clock(secs)
        self.record.rewind(state.get("metrics_bytes", self.record.position()))
        self.saved_step = loaded.step
        lineage = [(int(version), int(generation)) for version, generation in state["lineage"]]
        said = {name: state[name] for name in ("data", "bad_steps", "evaluations", "has_images") if name in state}
        return Progress(loaded.step, lineage, **said), loaded.warnings

    def due(self, step: int) -> bool:
        """Rank 0's clock decides for all."""
        return self.enabled and bool(self.session.exchange.broadcast(self.periodic.due(step)))

    def save(self, progress: Progress) -> None:
        """Copies to host memory and returns; the files are written beside training. Waits for the save before."""
        self.wait()
        session = self.session
        state = {
            "lineage": progress.lineage,
            "data": progress.data,
            "bad_steps": progress.bad_steps,
            "evaluations": progress.evaluations,
            "has_images": progress.has_images,
            "rng": session.exchange.gather(get_rng()),
            "clocks": {name: timer.clock() for name, timer in self.timers.items()},
            "metrics_bytes": self.record.position(),
            "config": fixed_values(session.config),
        }
        staged = checkpoint.stage(progress.step, session.engine, state)
        self._writing = progress.step, self._thread.submit(self._write, staged)

    def wait(self) -> None:
        """Until the checkpoint that is being written is there. Collective; raises CheckpointError."""
        if self._writing is None:
            return
        step, future = self._writing
        self._writing = None
        secs = future.result()
        self.saved_step = step
        self.save_secs = self.session.exchange.max_all(secs)

    def _write(self, staged: Staged) -> float:
        """In the thread. Batches that none of the kept checkpoints needs may go then."""
        session, started = self.session, time.perf_counter()
        keep, group = session.config.recover.keep, self._group
        checkpoint.write(self.root, staged, keep=keep, gather=lambda value: gather_over(group, value), group=group)
        if session.is_first and session.config.type == "rl":
            kept = checkpoint.oldest(self.root)
            body = {"oldest_step": (staged.step if kept is None else kept) + 1}
            identity = f"retain-{staged.step}-{session.generation}"
            session.services.post("rollout", "/retain", body, request_id=identity)
        return time.perf_counter() - started

    def save_on_stop(self, progress: Progress, *, whole: bool) -> str:
        """When asked to stop: saves the last completed step if there is time; returns what was done, in words.

        `whole`: the weights are those of `progress.step`, no update of the next one has begun.
        """
        if not self.enabled:
            return "recover.mode is off: nothing was saved"
        self.wait()
        if self.saved_step == progress.step:
            return f"checkpoint step-{progress.step} stands"
        if not whole:
            return f"stopped between two updates of step {progress.step + 1}: checkpoint {self.saved_step} stands"
        if self.save_secs is not None and self.save_secs > self.session.stop.grace / 2:
            return f"a save takes {self.save_secs:.0f} s, too long now: checkpoint {self.saved_step} stands"
        self.save(progress)
        self.wait()
        return f"saved step-{progress.step}"


def get_rng() -> dict[str, Any]:
    """Every generator that this rank may draw from."""
    version, words, gauss = random.getstate()
    found = {"torch": torch.get_rng_state().numpy().tobytes().hex(), "python": [version, list(words), gauss]}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state().numpy().tobytes().hex()
    return found


def set_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(_bytes(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(bytes.fromhex(text)), dtype=torch.uint8)
