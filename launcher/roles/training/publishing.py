"""Weights out of the engine: versions for the servers, and checkpoints as the hub ships them.

Owns names, lineage and the order gather → write → tell; how files are written and verified is core.weights.
"""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

from core.weights.manifest import NAME as MANIFEST
from core.weights.manifest import Manifest
from core.weights.publish import publish
from launcher.roles.training.setup import Session

Lineage = list[tuple[int, int]]


@dataclass
class Publisher:
    """Publishes versions of one generation of ranks."""

    session: Session
    lineage: Lineage = field(default_factory=list)  # (first version, generation), oldest first
    secs: float = 0.0  # of the last publish

    def begin(self, version: int, lineage: Lineage) -> None:
        """From `version` on this generation continues what `lineage` describes."""
        self.lineage = [*lineage, (version, self.session.generation)]

    def publish(self, version: int) -> None:
        """Collective: writes the version and tells the rollout service."""
        session, started, done = self.session, time.perf_counter(), time.time()
        name = f"v{version:06d}-r{session.generation}"
        manifest = self._write(session.arguments.run_dir.weights, name, version)
        if session.is_first:
            body = {
                "version": version,
                "generation": session.generation,
                "name": name,
                "path": str(session.arguments.run_dir.weights / name),
                "digest": manifest.digest,
                "step": version,
                "optimizer_done": done,
            }
            session.services.post("rollout", "/publish", body, request_id=f"publish-{name}")
        self.secs = time.perf_counter() - started

    def save_hub(self, step: int) -> Path:
        """Collective: `hub/step-<N>`, which transformers loads, and `hub/latest`."""
        hub = self.session.arguments.run_dir.hub
        final = hub / f"step-{step}"
        scratch = f"scratch-{step}-{self.session.generation}-{self.session.arguments.attempt}"
        self._write(hub / ".writing", scratch, step)
        if self.session.is_first:
            written = hub / ".writing" / scratch
            (written / MANIFEST).unlink()
            if final.exists():
                shutil.rmtree(final)
            written.rename(final)
            shutil.rmtree(hub / ".writing", ignore_errors=True)
            link = hub / f".latest.{os.getpid()}"
            link.symlink_to(final.name)
            link.rename(hub / "latest")
        self.session.exchange.barrier()
        return final

    def _write(self, directory: Path, name: str, version: int) -> Manifest:
        session = self.session
        return publish(
            directory,
            name,
            session.engine.publish_share(),
            session.model_files,
            rank=session.mesh.rank,
            world=session.mesh.size,
            gather=session.exchange.gather,
            barrier=session.exchange.barrier,
            version=version,
            generation=session.generation,
            lineage=self.lineage,
        )
