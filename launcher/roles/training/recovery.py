"""Where training stands, saved and found again: the trainer is the only authority on progress.

Owns the state that goes with a checkpoint, when one is due, and what is saved when the run is asked to stop; the files
are core.engine.checkpoint's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from core.engine import checkpoint
from launcher.roles.training.periodic import Periodic
from launcher.roles.training.setup import Session

DEFAULT_FREQ_SECS = 600
Lineage = list[tuple[int, int]]


@dataclass
class Progress:
    """What a checkpoint says besides weights and moments."""

    step: int = 0
    lineage: Lineage = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)  # sft: place in the data, phase


class Recovery:
    """Checkpoints of one run; collective."""

    def __init__(self, session: Session, steps_per_epoch: int) -> None:
        self.session = session
        self.root = session.arguments.run_dir.checkpoints
        recover = session.config.recover
        self.enabled = recover.mode in ("on", "auto")
        self.periodic = Periodic(recover, steps_per_epoch)
        if not self.periodic.ever:
            self.periodic.freq_secs = DEFAULT_FREQ_SECS
        self.saved_step: int | None = None
        self.save_secs: float | None = None

    def load(self) -> tuple[Progress, list[str]]:
        """The newest whole checkpoint into the engine, or the beginning; with warnings about broken ones."""
        loaded = checkpoint.load(self.root, self.session.engine, gather=self.session.exchange.gather)
        if loaded is None:
            return Progress(), []
        state = loaded.state
        rng = state["rng"]
        if len(rng) == self.session.mesh.size:
            own = bytes.fromhex(rng[self.session.mesh.rank])
            torch.set_rng_state(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        self.saved_step = loaded.step
        lineage = [(int(version), int(generation)) for version, generation in state["lineage"]]
        return Progress(loaded.step, lineage, state["data"]), loaded.warnings

    def due(self, step: int) -> bool:
        """Rank 0's clock decides for all."""
        return self.enabled and bool(self.session.exchange.broadcast(self.periodic.due(step)))

    def save(self, progress: Progress) -> None:
        """Writes a checkpoint; batches that none of the kept ones needs may go."""
        session, started = self.session, time.perf_counter()
        rng = session.exchange.gather(torch.get_rng_state().numpy().tobytes().hex())
        state = {"lineage": progress.lineage, "data": progress.data, "rng": rng, "config_seed": session.config.seed}
        keep = session.config.recover.keep
        checkpoint.save(self.root, progress.step, session.engine, state, keep=keep, gather=session.exchange.gather)
        self.saved_step = progress.step
        self.save_secs = session.exchange.max_all(time.perf_counter() - started)
        if session.is_first and session.config.type == "rl":
            kept = checkpoint.oldest(self.root)
            body = {"oldest_step": (progress.step if kept is None else kept) + 1}
            session.services.post("rollout", "/retain", body, request_id=f"retain-{progress.step}-{session.generation}")

    def save_on_stop(self, progress: Progress, *, whole: bool) -> str:
        """When asked to stop: saves the last completed step if there is time; returns what was done, in words.

        `whole`: the weights are those of `progress.step`, no update of the next one has begun.
        """
        if not self.enabled:
            return "recover.mode is off: nothing was saved"
        if self.saved_step == progress.step:
            return f"checkpoint step-{progress.step} stands"
        if not whole:
            return f"stopped between two updates of step {progress.step + 1}: checkpoint {self.saved_step} stands"
        if self.save_secs is not None and self.save_secs > self.session.stop.grace / 2:
            return f"a save takes {self.save_secs:.0f} s, too long now: checkpoint {self.saved_step} stands"
        self.save(progress)
        return f"saved step-{progress.step}"
