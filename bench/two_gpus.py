"""Two GPUs of one host: verify-parallel on a 3B-shaped Qwen2.5-VL in bf16, and tokens/s of dp2 over one GPU.

    python -m bench.two_gpus [--only eager scaling compiled] [--tiny]

Verification: dp2, tp2 and cp2 (both styles) against a float32 reference, each at most 1.25 times as far from it as one
GPU in bf16. Scaling: the same documents a GPU, full recomputation, forward, backward and the gradient's
reduction, from batches that are on the card.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from bench.train_step import RULES, actor, documents, random_weights, write_config
from core.engine.certificate import Work
from core.engine.documents import pack_documents
from core.engine.microbatch import Limits, pack
from core.engine.train_engine import Micro, TrainEngine
from core.ops.packed import PackedBatch
from core.parallel.mesh import Degrees
from launcher.roles.verification.ranks import Layout, Spec, VerificationError, lines, rank_engine, verify

LAYOUTS = (
    Layout("dp2", Degrees(dp_shard=2)),
    Layout("tp2", Degrees(tp=2)),
    Layout("cp2 ulysses", Degrees(cp=2)),
    Layout("cp2 allgather", Degrees(cp=2), "allgather"),
)


def spec(folder: Path, tiny: bool, count: int, tokens: int, completion: int, *, compiled: bool = True) -> Spec:
    found, pixels = documents(count, tokens, images=count, completion=completion)
    limit = tokens * 4
    work = Work(found, pixels, RULES, Limits(limit, limit * 4))
    chosen = actor(checkpointing=True, dtype="float32" if tiny else "bfloat16", compiled=compiled)
    return Spec(folder, chosen, work, LAYOUTS, "cpu" if tiny else "cuda", fill=random_weights)


def certify(name: str, wanted: Spec) -> bool:
    """Prints the table; True when a layout is too far or could not be computed."""
    started = time.perf_counter()
    try:
        verdicts = verify(wanted)
    except VerificationError as error:
        print(f"{name}: {str(error)[:6000]}", flush=True)
        return True
    print(f"{name}, {time.perf_counter() - started:.0f} s", *lines(verdicts), sep="\n", flush=True)
    return any(verdict.too_far for verdict in verdicts)


def ready(engine: TrainEngine, work: Work) -> tuple[list[Micro], int]:
    """This rank's micro-batches, built and on its device, and the tokens of all ranks."""
    mesh = engine.mesh
    (minibatch,) = pack([d.item() for d in work.documents], ranks=mesh.dp_size, limits=work.limits).minibatches
    micros = []
    for numbers, tower in zip(minibatch.ranks[mesh.dp_rank], minibatch.tower, strict=True):
        chosen = [work.documents[i] for i in numbers]
        batch = pack_documents(chosen, work.pixels, work.rules, tower=tower).to(mesh.device)
        micros.append(Micro(partial(_same, batch), empty=not chosen))
    return micros, sum(len(document.ids) for document in work.documents)


def _same(batch: PackedBatch) -> PackedBatch:
    return batch


def scaling(rank: int, world: int, wanted: Spec, store: str, out: str) -> None:
    """Seconds of a step on `world` ranks."""
    engine = rank_engine(wanted, Layout("", Degrees(dp_shard=world)), rank, dist.FileStore(store, world))
    micros, tokens = ready(engine, wanted.work)
    secs = []
    for _ in range(8):
        dist.barrier()
        started = time.perf_counter()
        engine.accumulate(micros, lambda j, scores: -scores.logp_R.sum() / tokens)
        secs.append(time.perf_counter() - started)
    if rank == 0:
        Path(out).write_text(json.dumps({"ranks": world, "tokens_per_s": tokens / statistics.median(secs[3:])}))
    dist.barrier()
    dist.destroy_process_group()


def measure_scaling(folder: Path, tiny: bool, count: int, tokens: int) -> None:
    """Prints tokens/s of one rank and of two, at the same documents a rank, and their ratio."""
    context = mp.get_context("spawn")
    speeds = []
    for world in (1, 2):
        wanted = spec(folder, tiny, count * world, tokens, tokens // 2)
        store, out = str(folder / f"store-{world}"), folder / f"scaling-{world}.json"
        ranks = [context.Process(target=scaling, args=(rank, world, wanted, store, str(out))) for rank in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(150)
            rank.kill()
        print(out.read_text() if out.exists() else f"{world} ranks: failed", flush=True)
        speeds += [json.loads(out.read_text())["tokens_per_s"]] if out.exists() else []
    if len(speeds) == 2:
        print(f"dp2 over one GPU: {speeds[1] / speeds[0]:.2f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--only", nargs="+", default=["eager", "scaling", "compiled"])
    asked = parser.parse_args()
    folder = write_config(Path(tempfile.mkdtemp()), asked.tiny)
    tokens, count = (340, 4) if asked.tiny else (2048, 8)
    print(f"torch {torch.__version__}", flush=True)
    far = False
    if "eager" in asked.only:
        far |= certify("eager", spec(folder, asked.tiny, 4, tokens, tokens // 8, compiled=False))
    if "scaling" in asked.only:
        measure_scaling(folder, asked.tiny, count, tokens)
    if "compiled" in asked.only:
        far |= certify("compiled blocks", spec(folder, asked.tiny, 4, tokens, tokens // 8))
    return int(far)


if __name__ == "__main__":
    sys.exit(main())
