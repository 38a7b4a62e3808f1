"""Runs one step of a run again on this machine's CPU, alone: batch from its log, state from the checkpoint before it.

Owns the stand-ins for the services (the run directory answers instead) and the comparison with the step's record.
Nothing in the run directory is changed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from core import config as configuration
from core.data.images import decode_png
from core.engine import checkpoint
from core.parallel.mesh import Degrees, build_mesh, join
from core.rl.trajectory import Sample, decode_samples, encode_samples
from core.rollout.service import weights_of
from core.telemetry.metrics import read_metrics
from launcher.roles.arguments import RoleArguments
from launcher.roles.training.setup import session_on
from launcher.roles.training.steps import make_index, read_index, train_step
from launcher.run_dir import RunDir

CLOSE = 1e-4
"""Relative: the same numbers in another layout, summed in another order."""


class LoggedBatch:
    """Answers for the rollout service from the file of one batch."""

    def __init__(self, run_dir: RunDir, step: int) -> None:
        self.samples, self.header = decode_samples((run_dir.batches / f"{step:06d}.safetensors").read_bytes())
        self.step = step

    def reply(self) -> dict[str, Any]:
        return {"ready": True, "end": False, "step": self.step, "samples": weights_of(self.samples)}

    def get_bytes(self, name: str, path: str, **query: Any) -> bytes:
        chosen: list[Sample] = [self.samples[int(i)] for i in query["indices"].split(",") if i]
        return encode_samples(chosen, {"step": self.step})


class LoggedImages:
    """Answers for the data service from rollouts/images."""

    def __init__(self, images: Path) -> None:
        self.images = images

    def get(self, names: Iterable[str]) -> dict[str, NDArray[np.uint8]]:
        return {name: decode_png((self.images / f"{name}.png").read_bytes()) for name in dict.fromkeys(names)}


def replay(run_dir: RunDir, step: int) -> dict[str, Any]:
    config = configuration.load(run_dir.config, [])
    batch = LoggedBatch(run_dir, step)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = RoleArguments(run_dir, 0, "training", 0, "replay", "http://127.0.0.1:9", Path(scratch))
        join(dist.HashStore(), rank=0, world=1, device=torch.device("cpu"), timeout=600.0)
        mesh = build_mesh(Degrees(1, 1, 1, 1), rank=0, device=torch.device("cpu"))
        session = session_on(mesh, arguments, config)
        session.services = batch  # type: ignore[assignment]
        session.pixels = LoggedImages(run_dir.images)  # type: ignore[assignment]
        if step > 1:
            checkpoint.load_step(run_dir.checkpoints / f"step-{step - 1}", session.engine)
        index = read_index(make_index(batch.reply(), session))
        total = int(batch.header.get("total_steps") or config.total_train_steps or step)
        outcome = train_step(index, session, total_steps=total, on_update=lambda: None)
    found = {"loss": outcome.loss, "grad_norm": outcome.grad_norm, "skipped": outcome.skipped}
    logged = read_metrics(run_dir.metrics).by_step.get(step, {})
    before = {key: logged.get(key) for key in found}
    return {"step": step, "replayed": found, "logged": before, "same": same(found, before)}


def same(found: dict[str, Any], before: dict[str, Any]) -> bool | None:
    """None where the step has no record (it was never finished)."""
    if before["grad_norm"] is None:
        return True if before["skipped"] and found["skipped"] else None
    scale = max(abs(before["grad_norm"]), 1.0)
    return all(abs(found[key] - before[key]) <= CLOSE * scale for key in ("loss", "grad_norm"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--step", type=int, required=True)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    told = replay(RunDir(arguments.run_dir.absolute()), arguments.step)
    if arguments.json:
        print(json.dumps(told))
    else:
        for key in ("loss", "grad_norm", "skipped"):
            print(f"{key:<10} logged {told['logged'][key]}, replayed {told['replayed'][key]}")
        verdict = {True: "the same", False: "NOT the same", None: "nothing to compare with"}[told["same"]]
        print(f"step {told['step']}: {verdict}")
    return 1 if told["same"] is False else 0


if __name__ == "__main__":
    sys.exit(main())
