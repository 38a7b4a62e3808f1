"""Tokens per second of the embedded engine with 1, 16 and 64 requests in flight, and the ratios.

    python bench/embedded_batching.py [--tokens 200] [--checkpoint DIR]

One thread, no HTTP: what batching itself gives. Exits 1 if 16 requests are less than four times as fast as one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from core.inference.embedded.assembly import assemble
from core.inference.embedded.engine import Engine
from core.inference.embedded.request import ModelTraits, Prompt, Request, Sampling
from launcher.roles.tiny.checkpoint import TinyModel, write_checkpoint
from models.archon.registry import family_of

WANTED = 4.0


def tokens_per_second(engine: Engine, traits: ModelTraits, count: int, tokens: int) -> float:
    left = threading.Semaphore(0)
    start = time.perf_counter()
    for number in range(count):
        params = {"max_new_tokens": tokens, "ignore_eos": True, "sampling_seed": number, "temperature": 1.0}
        prompt = Prompt.expand([number + 1, *range(30)], (), traits)
        request = Request(f"{start}-{number}", prompt, Sampling.parse(params, traits))
        request.notify = lambda _: left.release()
        engine.submit(request)
    for _ in range(count):
        if not left.acquire(timeout=300):
            raise SystemExit(f"{count} requests did not end within 300 s")
    return count * tokens / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        directory = options.checkpoint or Path(made)
        if options.checkpoint is None:
            write_checkpoint(directory, TinyModel())
        family = family_of(directory)
        args = family.args.from_pretrained(directory)
        model = family.model(args).eval().requires_grad_(False)
        server = assemble(model, args, lambda path: None, directory=directory, token=None)
        server.engine.start()
        tokens_per_second(server.engine, server.traits, 4, 20)
        speeds = {
            count: statistics.median(
                tokens_per_second(server.engine, server.traits, count, options.tokens) for _ in range(options.rounds)
            )
            for count in (1, 16, 64)
        }
        server.engine.stop()
    for count, speed in speeds.items():
        print(f"{count:3d} requests: {speed:9.0f} tokens/s, {speed / speeds[1]:5.1f} times one")
    return 0 if speeds[16] >= WANTED * speeds[1] else 1


if __name__ == "__main__":
    sys.exit(main())
