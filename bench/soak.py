"""A run of the smoke configuration for minutes or hours while its servers are killed at random: does anything grow?

Samples every process of the run by its role: resident memory, descriptors, threads; /dev/shm and the run directory
beside. Growth from the second quarter to the last ends it with exit 1, and so does an audit that fails. From an hour on
memory is judged too, and the rest to a descriptor or two: a short run has not settled.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from launcher.node.restarts import SETTLED_SECS
from launcher.run_dir import RunDir
from tests.support.runs import await_gone, launcher, log_tails

SAMPLE_SECS = 2.0
KILL_SECS = (20.0, 60.0)
START_SECS = 180.0
SETTLED_MINUTES = 60
SHORT = 8  # times what a settled run may move: in minutes a median still jumps with what is in flight
RSS_SHARE, RSS_MB_A_STEP = 1.02, 0.05
GROUP_BYTES = 4096
BATCH_SIZE = 4  # of configs/smoke.yaml
TAIL_BYTES = 20_000
APPENDED = (".jsonl", ".log", "tfevents")
SERVER = "launcher.roles.embedded_server"
ROLES = {
    "guard.py": "guards",
    "launcher.node": "daemons",
    "launcher.roles.trainer": "ranks",
    "launcher.roles.rollout": "rollout",
    "launcher.roles.data": "data",
    SERVER: "servers",
    "core.data.image_worker": "image workers",
    "worker.py": "reward workers",
}


@dataclass
class Sample:
    at: float
    step: int
    rss_mb: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    descriptors: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    threads: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    shm_mb: float = 0.0
    disk_mb: float = 0.0  # of the run directory, without the appended files
    appended_bytes: int = 0


def processes(run: Path) -> list[tuple[str, psutil.Process]]:
    """Every process of the run with its role: those that name the run directory, and what they have started."""
    named = [each for each in psutil.process_iter(["cmdline"]) if str(run) in (each.info["cmdline"] or [])]
    found: dict[int, psutil.Process] = {}
    for each in named:
        try:
            found |= {process.pid: process for process in (each, *each.children(recursive=True))}
        except psutil.Error:
            continue
    return [(role_of(process), process) for process in found.values()]


def role_of(process: psutil.Process) -> str:
    try:
        words = process.cmdline()
    except psutil.Error:
        return "gone"
    return next((role for word in words for end, role in ROLES.items() if word.endswith(end)), "others")


def take(run: Path, began: float) -> Sample:
    sample = Sample(time.monotonic() - began, last_step(run / "metrics.jsonl"))
    for role, process in processes(run):
        try:
            with process.oneshot():
                sample.rss_mb[role] += process.memory_info().rss / 2**20
                sample.descriptors[role] += process.num_fds()
                sample.threads[role] += process.num_threads()
        except psutil.Error:
            continue
    sample.shm_mb = sum(sizes(shared(run))) / 2**20
    files = files_below(run)
    appended = [path for path in files if any(word in path.name for word in APPENDED)]
    sample.appended_bytes = sum(sizes(appended))
    sample.disk_mb = (sum(sizes(files)) - sample.appended_bytes) / 2**20
    return sample


def shared(run: Path) -> list[Path]:
    """What the run keeps in memory that looks like files; there is one soak at a time."""
    root = Path("/dev/shm") / f"vlm-rl-{os.getuid()}"
    return [path for path in files_below(root) if run.name in str(path)]


def files_below(root: Path) -> list[Path]:
    """Of a tree that changes meanwhile: what is gone when it is looked at is left out."""
    return [Path(folder) / name for folder, _, names in os.walk(root) for name in names]


def sizes(paths: Iterable[Path]) -> list[int]:
    found = []
    for path in paths:
        try:
            found.append(path.stat().st_size)
        except OSError:
            continue
    return found


def last_step(metrics: Path) -> int:
    """Of the end of the file: it grows for hours."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
            lines = file.read().splitlines()[1:-1]
    except OSError:
        return 0
    return max((record["step"] for record in map(json.loads, lines) if record["kind"] == "step"), default=0)


def kill_a_server(run: Path) -> bool:
    """Its process, not its guard: as the kernel would when memory runs out. One that was killed a moment ago is let
    live: its daemon would leave it out as flapping, and rightly.
    """
    settled = time.time() - SETTLED_SECS - SAMPLE_SECS
    servers = [each for role, each in processes(run) if role == "servers" and each.create_time() < settled]
    if not servers:
        return False
    handle = os.pidfd_open(random.choice(servers).pid)
    signal.pidfd_send_signal(handle, signal.SIGKILL)
    os.close(handle)
    return True


def start(root: Path) -> Path:
    launcher("make-model", str(root / "tiny"), "--pictures", str(root / "pictures"), timeout=300).expect()
    trial = f"soak-{os.getpid()}"
    words = [
        "submit", "--emulate", "configs/smoke.yaml", "experiment_name=soak", f"trial_name={trial}",
        f"cluster.fileroot={root / 'runs'}", f"paths.cache={root / 'cache'}", f"actor.path={root / 'tiny'}",
        f"train_dataset.path={root / 'pictures'}", f"valid_dataset.path={root / 'pictures'}",
        "total_train_steps=1000000", "total_train_epochs=1000000", "evaluator.freq_steps=50", "saver.freq_steps=null",
        "saver.freq_epochs=1000000", "recover.freq_steps=10", "recover.retries=1000000",
        "allocation_mode=embedded:d2+d1",
        "train_dataset.dataset_kwargs.max_rows=400",  # an epoch is 100 steps: caches of rows and pictures fill at once
    ]  # fmt: skip
    launcher(*words, timeout=120).expect()
    run = root / "runs" / "soak" / trial
    return run


def soak(run: Path, minutes: float) -> tuple[list[Sample], int]:
    """From the first steps on; ends the run."""
    samples: list[Sample] = []
    kills = 0
    deadline = time.monotonic() + START_SECS
    try:
        while last_step(run / "metrics.jsonl") < 1:
            if time.monotonic() > deadline:
                raise SystemExit(f"no step within {START_SECS:g} s\n{log_tails(run)}")
            time.sleep(SAMPLE_SECS / 4)
        began = time.monotonic()
        next_kill = began + KILL_SECS[0]
        while time.monotonic() - began < 60 * minutes:
            time.sleep(SAMPLE_SECS)
            samples.append(take(run, began))
            if time.monotonic() > next_kill and kill_a_server(run):
                kills += 1
                next_kill = time.monotonic() + random.uniform(*KILL_SECS)
            state = json.loads(RunDir(run).state.read_text())
            if state["phase"] in ("failed", "cancelled"):
                raise SystemExit(f"the run {state['phase']}: {state['error']}\n{log_tails(run)}")
    finally:
        launcher("cancel", str(run), "-y", timeout=120)
        await_gone(run, 60)
    return samples, kills


def judge(samples: list[Sample], minutes: float) -> list[str]:
    """What grew: the median of the last quarter against that of the second."""
    quarter = len(samples) // 4
    second, last = samples[quarter : 2 * quarter], samples[-quarter:]

    def medians(value: Callable[[Sample], float]) -> tuple[float, float]:
        before, after = (statistics.median(value(each) for each in part) for part in (second, last))
        return before, after

    first_step, last_one = medians(lambda each: each.step)
    steps = last_one - first_step
    if steps <= 0:
        return [f"no step between the quarters: the last samples are at steps {[each.step for each in samples][-5:]}"]
    problems = []

    def compare(name: str, value: Callable[[Sample], float], most: Callable[[float], float], judged: bool) -> None:
        before, after = medians(value)
        print(f"{name:<28} {before:10.1f} → {after:10.1f}")
        if judged and after > most(before):
            problems.append(f"{name} grew from {before:.1f} to {after:.1f} in {steps:.0f} steps")

    settled = minutes >= SETTLED_MINUTES
    steady = lambda slack: lambda before: before + (slack if settled else SHORT * slack)  # noqa: E731
    compare("descriptors", lambda each: sum(each.descriptors.values()), steady(2), True)
    compare("threads", lambda each: sum(each.threads.values()), steady(1), True)
    compare("/dev/shm, MB", lambda each: each.shm_mb, steady(1), True)
    compare("disk, MB", lambda each: each.disk_mb, steady(1), True)
    flat = lambda before: min(before * RSS_SHARE, before + RSS_MB_A_STEP * steps)  # noqa: E731
    compare("resident, MB", lambda each: sum(each.rss_mb.values()), flat, settled)
    for role in sorted({role for each in samples for role in each.rss_mb}):
        for name, value in (("resident, MB", "rss_mb"), ("descriptors", "descriptors"), ("threads", "threads")):
            compare(f"  {role}: {name}", lambda each, r=role, v=value: getattr(each, v).get(r, 0), flat, False)  # type: ignore[misc]
    before, after = medians(lambda each: each.appended_bytes)
    each_group = (after - before) / (steps * BATCH_SIZE)
    print(f"{'appended, bytes a group':<28} {each_group:10.0f}")
    if each_group > GROUP_BYTES:
        problems.append(f"appended files take {each_group:.0f} bytes a group, more than {GROUP_BYTES}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="soak-") as root:
        run = start(Path(root))
        samples, kills = soak(run, arguments.minutes)
        print(f"{samples[-1].step} steps, {kills} servers killed, {len(samples)} samples")
        problems = judge(samples, arguments.minutes)
        if kills == 0:
            problems.append("no server was killed")
        if left := shared(run):
            problems.append(f"left in /dev/shm: {', '.join(map(str, left[:5]))}")
        audited = launcher("audit", str(run), timeout=600)
        print((audited.out + audited.err).strip())
        if audited.status:
            problems.append("the audit found something")
    for problem in problems:
        print(f"soak: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
