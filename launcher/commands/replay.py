"""replay: a trainer step again, from its logged batch and the checkpoint before it; a process with torch does it."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from core.config.errors import UserError
from launcher.find_run import find_run
from launcher.node.specs import REPOSITORY


class ReplayError(UserError):
    """The step cannot be run again: what it needs is not kept."""


def run(arguments: argparse.Namespace) -> int:
    run_dir = find_run(arguments.run)
    step = arguments.step
    checkpoint = run_dir.checkpoints / f"step-{step - 1}"
    batch = run_dir.batches / f"{step:06d}.safetensors"
    kept = sorted(int(path.name.removeprefix("step-")) for path in run_dir.checkpoints.glob("step-*"))
    missing = [str(path) for path in (batch, checkpoint) if not path.exists() and (path is batch or step > 1)]
    if step < 1 or missing:
        batches = sorted(int(path.stem) for path in run_dir.batches.glob("[0-9]*.safetensors"))
        raise ReplayError(
            f"step {step} of {run_dir.root} cannot be run again: {', '.join(missing) or 'steps count from 1'} missing\n"
            f"  kept are batches {batches} and checkpoints {kept}; step N needs batch N and checkpoint N-1 "
            "(recover.freq_steps, recover.keep)"
        )
    words = [sys.executable, "-P", "-m", "launcher.roles.replay", "--run-dir", str(run_dir.root), "--step", str(step)]
    words += ["--json"] if arguments.json else []
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(words, env=environment, check=False).returncode
