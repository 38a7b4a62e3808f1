"""The recipe with one real vLLM server and one trainer, on two GPUs of this machine: what it took, what it left.

    python -m bench.gpu_run --vllm-python PYTHON [--tiny] [--steps 5] [--kill 3] [key=value …]

A 3B-shaped Qwen2.5-VL of random weights and pictures of Geometry3K's sizes, `python -m launcher run` over the recipe,
then tables from metrics.jsonl and what nvidia-smi says. `--kill N`: kill -9 of the launcher once step N is recorded.
Without a GPU it rehearses with a small model and --emulate. Exit status 1 where the run did not end as it should, the
parity gate was not passed, or something is left.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.shaped import SHAPED_3B, SHAPED_TINY, write_model, write_pictures
from bench.weight_sync import MB, file_rates
from core.telemetry.files import read_lines

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "configs" / "qwen2_5_vl_3b_geometry3k_grpo.yaml"
MARK = "BENCH_GPU_RUN"
GONE_SECS = 60.0
RESIDUE_MIB = 16  # that the driver itself may keep for a while after the last process (4 were seen)
RATE_BYTES = 1 << 30


@dataclass
class Trial:
    folder: Path
    memory: Path
    tiny: bool
    steps: int
    vllm_python: str | None
    more: list[str]
    name: str = field(default_factory=lambda: f"run-{uuid.uuid4().hex[:8]}")

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs" / "gpu" / self.name

    @property
    def emulated(self) -> bool:
        return not torch.cuda.is_available()

    def command(self) -> list[str]:
        backend = "vllm" if self.vllm_python or not self.emulated else "embedded"
        words = [
            *("experiment_name=gpu", f"trial_name={self.name}", f"allocation_mode={backend}:d1+archon:d1"),
            *("cluster.n_gpus_per_node=2", "cluster.gpu_memory_gib=140", f"cluster.fileroot={self.folder / 'runs'}"),
            *(f"actor.path={self.folder / 'model'}", f"train_dataset.path={self.folder / 'pictures'}"),
            *("valid_dataset=null", "reward=configs.spread_reward:spread", f"total_train_steps={self.steps}"),
            *(f"paths.local={self.memory}", "rollout.parity_check_steps=1", "rollout.setup_timeout=600"),
            *("vllm.max_model_len=4096", "embedded.stands_in=false"),
        ]
        words += [f"paths.vllm_python={self.vllm_python}"] if self.vllm_python else []
        if self.tiny:
            words += ["train_dataset.batch_size=8", "gconfig.max_new_tokens=64", "actor.optimizer.lr=3e-3"]
            words += ["rollout.max_head_offpolicyness=1", "actor.archon.enable_compile=false"]
        emulate = ["--emulate"] if self.emulated else []
        return [sys.executable, "-m", "launcher", "run", *emulate, str(RECIPE), *words, *self.more]


def gpu_memory() -> list[int]:
    """MiB in use, by GPU; empty without nvidia-smi."""
    return [int(line) for line in smi("--query-gpu=memory.used")]


def gpu_processes() -> list[str]:
    return smi("--query-compute-apps=pid,used_memory")


def smi(query: str) -> list[str]:
    try:
        words = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def marked(mark: str) -> Iterator[str]:
    """Every process that inherited the mark, however it calls itself now."""
    wanted = f"{MARK}={mark}".encode()
    for place in Path("/proc").iterdir():
        if place.name.isdecimal() and int(place.name) != os.getpid():
            with suppress(OSError):
                if wanted in (place / "environ").read_bytes():
                    words = (place / "cmdline").read_bytes().split(b"\0")
                    yield f"{place.name} {b' '.join(words).decode(errors='replace')[:120]}"


def start(trial: Trial) -> subprocess.Popen[bytes]:
    command = trial.command()
    print("$ " + " ".join(command), flush=True)
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, MARK: trial.name})


def end(trial: Trial, process: subprocess.Popen[bytes], kill_after: int | None, limit: float) -> str:
    """How the run ended, in words."""
    deadline = time.monotonic() + limit
    while process.poll() is None:
        if time.monotonic() > deadline:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            return f"not finished within {limit:g} s"
        if kill_after is not None and len(step_records(trial)) >= kill_after:
            process.kill()
            process.wait()
            return "killed"
        time.sleep(0.2)
    return "done" if process.returncode == 0 else f"exit status {process.returncode}"


def left_behind(mark: str, before: list[int]) -> tuple[float, list[str]]:
    """Seconds until nothing of the run is left, and what is left after GONE_SECS."""
    began = time.monotonic()
    while True:
        left = [f"process {each}" for each in marked(mark)]
        left += [f"GPU process {each}" for each in gpu_processes()]
        now = gpu_memory()
        left += [f"GPU {i}: {now[i]} MiB, before {was}" for i, was in enumerate(before) if now[i] > was + RESIDUE_MIB]
        if not left or time.monotonic() - began > GONE_SECS:
            return time.monotonic() - began, left
        time.sleep(0.2)


def step_records(trial: Trial) -> list[dict[str, Any]]:
    path = trial.run_dir / "metrics.jsonl"
    return [row for row in read_lines(path) if row.get("kind") == "step"] if path.exists() else []


COLUMNS = {
    "step": lambda row: row["step"],
    "secs": lambda row: row["secs"]["step"],
    "waits": lambda row: row["secs"]["wait_batch"],
    "scoring": lambda row: row["secs"]["prox"],
    "fwd+bwd": lambda row: row["secs"]["forward_backward"],
    "optimizer": lambda row: row["secs"]["optimizer"],
    "publish": lambda row: row["secs"]["publish"],
    "tokens": lambda row: row["tokens"],
    "tokens/s fwd+bwd": lambda row: row["tokens"] / row["secs"]["forward_backward"],
    "tokens/s trainer": lambda row: row["tokens_per_s_train"],
    "sampled/s": lambda row: row["tokens_per_s_rollout"],
    "staleness": lambda row: row["staleness_mean"],
    "entropy": lambda row: row["entropy"],
    "parity tokens": lambda row: row["parity_tokens"],
    "parity mean": lambda row: row["parity_mean"],
    "parity max": lambda row: row["parity_max"],
    "behave diff": lambda row: row["behave_diff_mean"],
    "grad norm": lambda row: row["grad_norm"],
    "GPU GiB": lambda row: (row.get("gpu_peak_mb") or 0) / 1024,
}
SYNC = ("version", "fetch", "load", "pause", "secs")


def table(titles: list[str], rows: list[list[Any]]) -> None:
    print("| " + " | ".join(titles) + " |\n|" + " --- |" * len(titles))
    for row in rows:
        print("| " + " | ".join(written(value) for value in row) + " |")
    print(flush=True)


def written(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def tables(records: list[dict[str, Any]]) -> None:
    table(list(COLUMNS), [[read(row) for read in COLUMNS.values()] for row in records])
    syncs = {row["sync"]["version"]: row["sync"] for row in records if row.get("sync")}
    table(list(SYNC), [[sync.get(name) for name in SYNC] for sync in syncs.values()])


def verdict(trial: Trial, ended: str, wanted: str, left: list[str]) -> list[str]:
    """What is not as it should be."""
    wrong = [] if ended == wanted else [f"the run ended: {ended}"]
    records = step_records(trial)
    parities = [row["parity_mean"] for row in records if row["parity_mean"] is not None]
    if not parities:
        wrong.append("the parity gate never opened")
    return wrong + [f"left: {each}" for each in left]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="the recipe on two GPUs with a real vLLM server")
    parser.add_argument("--folder", type=Path, help="model, pictures and runs; kept [a temporary directory]")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm/bench-gpu-run"), help="[%(default)s]")
    parser.add_argument("--vllm-python", help="a Python that has vLLM")
    parser.add_argument("--tiny", action="store_true", help="a small model, a few tokens")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--kill", type=int, metavar="N", help="kill -9 of the launcher once step N is recorded")
    parser.add_argument("--limit", type=float, default=540, help="seconds for the run [%(default)g]")
    parser.add_argument("--only-make", action="store_true", help="make model and pictures, run nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_args()


def make(folder: Path, tiny: bool, steps: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.perf_counter()
    if not (folder / "model").exists():
        size = write_model(folder / "model", SHAPED_TINY if tiny else SHAPED_3B, device)
        print(f"model: {size / 1e9:.2f} GB in {time.perf_counter() - began:.1f} s", flush=True)
    if not (folder / "pictures").exists():
        write_pictures(folder / "pictures", 32 * (steps + 8))


def make_apart(folder: Path, asked: argparse.Namespace) -> None:
    """In a process of its own: this one must hold nothing on a GPU."""
    words = ["--only-make", "--folder", str(folder), "--steps", str(asked.steps), *(["--tiny"] if asked.tiny else [])]
    subprocess.run([sys.executable, "-m", "bench.gpu_run", *words], cwd=ROOT, check=True)


def main() -> int:
    asked = parsed()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="gpu-run-"))
    if asked.only_make:
        make(folder, asked.tiny, asked.steps)
        return 0
    make_apart(folder, asked)
    trial = Trial(folder, asked.memory, asked.tiny, asked.steps, asked.vllm_python, asked.overrides)
    asked.memory.mkdir(parents=True, exist_ok=True)
    before = gpu_memory()
    print(f"torch {torch.__version__}; GPUs use {before} MiB", flush=True)
    began = time.time()
    process = start(trial)
    try:
        ended = end(trial, process, asked.kill, asked.limit)
    finally:
        process.kill()
    secs = time.time() - began
    gone, left = left_behind(trial.name, before)
    records = step_records(trial)
    tables(records)
    first = records[0]["time"] - began if records else None
    print(f"run {trial.name}: {ended} after {secs:.1f} s (first step recorded after {written(first)} s)")
    print(f"nothing left after {gone:.1f} s" if not left else f"left after {gone:.1f} s: {len(left)} things")
    write, read = (rate * MB / 1e9 for rate in file_rates(folder, asked.memory, RATE_BYTES))
    print(f"this machine's files: written {write:.2f} GB/s ({folder}), copied to memory {read:.2f} GB/s")
    wrong = verdict(trial, ended, "killed" if asked.kill else "done", left)
    print("\n".join(f"✗ {line}" for line in wrong) or "✓ as it should be", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
