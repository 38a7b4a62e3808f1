"""How long training stands still for a checkpoint, and how long writing it takes beside training.

Prints one line: the copy to host memory (the pause), the whole save to `--root`, and a read of it back with its hashes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from core.engine import checkpoint
from launcher.roles.tiny.checkpoint import TinyModel, write_checkpoint
from tests.engine.scene import ADAM, alone, make_engine


def gather(value: object) -> list[object]:
    return [value]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--root", type=Path, help="on the disk to be measured; default: a temporary directory")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.root) as scratch:
        root = Path(scratch)
        sizes = TinyModel(hidden=arguments.hidden, layers=arguments.layers, intermediate=4 * arguments.hidden)
        write_checkpoint(root / "model", sizes)
        engine = make_engine(root / "model", alone(), dtype="float32", optimizer=ADAM)
        pauses, saves = [], []
        for step in range(1, arguments.times + 1):
            began = time.perf_counter()
            staged = checkpoint.stage(step, engine, {})
            pauses.append(time.perf_counter() - began)
            checkpoint.write(root / "checkpoints", staged, keep=1, gather=gather, group=None)
            saves.append(time.perf_counter() - began)
        size = sum(path.stat().st_size for path in (root / "checkpoints" / f"step-{step}").iterdir())
        began = time.perf_counter()
        checkpoint.load(root / "checkpoints", engine, gather=gather)
        loaded = time.perf_counter() - began
    pause, save = statistics.median(pauses), statistics.median(saves)
    print(
        f"{size / 2**20:.0f} MB: training stands still for {pause:.2f} s of a save of {save:.2f} s "
        f"({pause / save:.0%}); loading takes {loaded:.2f} s"
    )


if __name__ == "__main__":
    main()
