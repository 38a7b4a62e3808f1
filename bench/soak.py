"""A run of the smoke configuration for minutes or hours while its server is killed at random: does anything grow?

Samples every process of the run: resident memory, descriptors, threads; /dev/shm and the run directory beside. With
`--check` (what `make soak` and CI do) growth ends it with exit 1. Memory is judged from an hour on: a short run has not
settled.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from launcher.run_dir import RunDir
from tests.support.runs import await_gone, command, environment, launcher, lines, log_tails

SAMPLE_SECS = 2.0
KILL_SECS = (20.0, 60.0)
RSS_MINUTES = 60
GROUP_BYTES = 4096
APPENDED = ("metrics.jsonl", "void.jsonl", "index.jsonl", "starts.jsonl", "published.jsonl", ".log", "tfevents")


@dataclass
class Sample:
    at: float
    step: int
    rss_mb: float = 0.0
    descriptors: int = 0
    threads: int = 0
    shm_mb: float = 0.0
    fixed_mb: float = 0.0  # of the run directory, without the appended files
    appended_bytes: int = 0


@dataclass
class Soak:
    run: Path
    samples: list[Sample] = field(default_factory=list)
    kills: int = 0

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if any(str(self.run) in word for word in words) and "submit" not in words:
                found.append(process)
        return found

    def take(self, began: float) -> None:
        steps = [record for record in lines_of(self.run / "metrics.jsonl") if record.get("kind") == "step"]
        sample = Sample(time.monotonic() - began, steps[-1]["step"] if steps else 0)
        for process in self.processes():
            try:
                with process.oneshot():
                    sample.rss_mb += process.memory_info().rss / 2**20
                    sample.descriptors += process.num_fds()
                    sample.threads += process.num_threads()
            except psutil.Error:
                continue
        shm = Path("/dev/shm") / f"vlm-rl-{os.getuid()}"
        sample.shm_mb = size_of(path for path in shm.rglob("*") if "soak" in str(path)) / 2**20
        files = [path for path in self.run.rglob("*") if path.is_file()]
        appended = [path for path in files if any(name in path.name for name in APPENDED)]
        sample.appended_bytes = size_of(appended)
        sample.fixed_mb = (size_of(files) - sample.appended_bytes) / 2**20
        self.samples.append(sample)

    def kill_a_server(self) -> None:
        """Its process, not its guard: as the kernel would when memory runs out."""
        role = "launcher.roles.embedded_server"
        words = ((each, each.cmdline()) for each in self.processes())
        servers = [each for each, line in words if role in line and "guard" not in str(line)]
        if servers:
            handle = os.pidfd_open(random.choice(servers).pid)
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
            self.kills += 1


def size_of(paths: object) -> int:
    total = 0
    for path in paths:  # type: ignore[attr-defined]
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total


def lines_of(path: Path) -> list[dict]:
    try:
        return lines(path)
    except ValueError:  # a line is being written
        return []


def start(root: Path) -> Soak:
    launcher("make-model", str(root / "tiny"), "--pictures", str(root / "pictures"), timeout=300).expect()
    words = [
        "submit", "--emulate", "configs/smoke.yaml", "experiment_name=soak", "trial_name=soak",
        f"cluster.fileroot={root / 'runs'}", f"paths.cache={root / 'cache'}", f"actor.path={root / 'tiny'}",
        f"train_dataset.path={root / 'pictures'}", f"valid_dataset.path={root / 'pictures'}",
        "total_train_steps=1000000", "total_train_epochs=1000000", "evaluator.freq_steps=50", "saver.freq_steps=null",
        "saver.freq_epochs=1000000", "recover.freq_steps=10", "recover.retries=1000000",
        "allocation_mode=embedded:d2+d1",
    ]  # fmt: skip
    subprocess.run(command(*words), env=environment(), check=True, timeout=120, capture_output=True)
    return Soak(root / "runs" / "soak" / "soak")


def soak(root: Path, minutes: float) -> Soak:
    found = start(root)
    began = time.monotonic()
    next_kill = began + 30.0
    try:
        while time.monotonic() - began < 60 * minutes:
            time.sleep(SAMPLE_SECS)
            found.take(began)
            if time.monotonic() > next_kill:
                found.kill_a_server()
                next_kill = time.monotonic() + random.uniform(*KILL_SECS)
            state = json.loads(RunDir(found.run).state.read_text())
            if state["phase"] in ("failed", "cancelled"):
                raise SystemExit(f"the run {state['phase']}: {state['error']}\n{log_tails(found.run)}")
    finally:
        launcher("cancel", str(found.run), "-y", timeout=120)
        await_gone(found.run, 60)
    return found


def judge(found: Soak, minutes: float) -> list[str]:
    """What grew: the last quarter against the second."""
    samples, problems = found.samples, []
    quarter = len(samples) // 4
    second, last = samples[quarter : 2 * quarter], samples[-quarter:]

    def medians(name: str) -> tuple[float, float]:
        return tuple(statistics.median(getattr(each, name) for each in part) for part in (second, last))  # type: ignore[return-value]

    steps = statistics.median(s.step for s in last) - statistics.median(s.step for s in second)
    if steps <= 0:
        return [f"no step between the quarters: {[s.step for s in samples][-5:]}"]
    for name, slack in (("descriptors", 8), ("threads", 4), ("shm_mb", 8.0), ("fixed_mb", 8.0)):
        before, after = medians(name)
        print(f"{name:<12} {before:10.1f} → {after:10.1f}")
        if after > before * 1.02 + slack:
            problems.append(f"{name} grew from {before:.1f} to {after:.1f}")
    before, after = medians("rss_mb")
    print(
        f"{'rss_mb':<12} {before:10.1f} → {after:10.1f}, "
        f"{(after - before) / steps:.4f} MB a step over {steps:.0f} steps"
    )
    if minutes >= RSS_MINUTES and (after > before * 1.02 or (after - before) / steps > 0.05):
        problems.append(f"resident memory grew from {before:.1f} to {after:.1f} MB")
    before, after = medians("appended_bytes")
    each = (after - before) / (steps * 4)
    print(f"{'appended':<12} {each:10.0f} bytes a group")
    if each > GROUP_BYTES:
        problems.append(f"appended files take {each:.0f} bytes a group, more than {GROUP_BYTES}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    with tempfile.TemporaryDirectory(prefix="soak-") as root:
        found = soak(Path(root), arguments.minutes)
        print(f"{found.samples[-1].step} steps, {found.kills} servers killed, {len(found.samples)} samples")
        problems = judge(found, arguments.minutes)
        audited = launcher("audit", str(found.run))
        print(audited.out.strip())
    for problem in problems:
        print(f"soak: {problem}", file=sys.stderr)
    return 1 if problems or audited.status else 0


if __name__ == "__main__":
    sys.exit(main())
