"""What asynchrony buys: the same samples with max_head_offpolicyness 0 and 4, server and trainer on a core each.

    python bench/async.py [--steps 64] [--check]

Answer lengths are lognormal (sigma 0.8, capped at 6 times the median). lr is 0, so both runs sample the same tokens.
`server busy` are the seconds in which the server had requests in flight, `trainer busy` the steps less their waiting.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from core.config import load  # noqa: E402
from core.rl.trajectory import Sample, decode_samples  # noqa: E402
from core.telemetry.files import read_lines  # noqa: E402
from launcher.attached import Attendance  # noqa: E402
from launcher.launch import begin  # noqa: E402
from launcher.node.state import Phase  # noqa: E402
from launcher.plan import settle  # noqa: E402
from launcher.schedulers.local import LocalScheduler  # noqa: E402

RATIO, OVERHEAD = 0.75, 1.25


@dataclasses.dataclass(frozen=True)
class Measured:
    """Seconds of one run from the start of its first step's wait to the end of its last step."""

    wall: float
    server_busy: float
    trainer_busy: float
    samples: dict[str, bytes]
    voided: int
    staleness_max: float


def overrides(home: Path, offpolicyness: int, steps: int) -> list[str]:
    return [
        "experiment_name=bench",
        f"trial_name=eta{offpolicyness}",
        f"cluster.fileroot={home / 'runs'}",
        f"actor.path={home / 'tiny'}",
        f"train_dataset.path={home / 'pictures'}",
        "valid_dataset=null",
        f"total_train_steps={steps}",
        "train_dataset.batch_size=8",
        "gconfig.n_samples=4",
        "gconfig.max_new_tokens=144",
        f"rollout.max_head_offpolicyness={offpolicyness}",
        "actor.optimizer.lr=0.0",
        "actor.mb_spec.max_tokens_per_mb=2048",
        "saver.freq_steps=null",
        "recover.mode=disabled",
        "train_dataset.dataset_kwargs.max_pixels=12544",
    ]


def measure(home: Path, offpolicyness: int, steps: int) -> Measured:
    """One run of configs/smoke.yaml with the bench's processes."""
    config, plan = settle(load(ROOT / "configs" / "smoke.yaml", overrides(home, offpolicyness, steps)), emulated=True)
    launch = dataclasses.replace(begin(config, plan), roles="bench.roles")
    state = Attendance(launch, LocalScheduler().place(launch, attached=True)).attend(quiet=True)
    if state.phase is not Phase.DONE:
        sys.exit(f"the run in {launch.run_dir.root} ended {state.phase}: {state.error}")
    records = [record for record in read_lines(launch.run_dir.metrics) if record["kind"] == "step"]
    first, batches = records[0], list(consumed(launch.run_dir.batches))
    wall = records[-1]["time"] - (first["time"] - first["secs"]["step"])
    return Measured(
        wall=wall,
        server_busy=sum(header["stats"]["server_busy_secs"] for header, _ in batches),
        trainer_busy=sum(record["secs"]["step"] - record["wait_rollout_secs"] for record in records),
        samples={sample.sample_id: sample.sampled_ids.tobytes() for _, samples in batches for sample in samples},
        voided=len(read_lines(launch.run_dir.void)),
        staleness_max=max(record["staleness_max"] for record in records),
    )


def consumed(directory: Path) -> Iterator[tuple[dict[str, Any], list[Sample]]]:
    """Header and samples of each logged batch."""
    for path in sorted(directory.glob("*.safetensors")):
        samples, header = decode_samples(path.read_bytes())
        yield header, samples


def verdict(zero: Measured, four: Measured) -> list[str]:
    """What falls short of the README's numbers."""
    ratio, overhead = four.wall / zero.wall, four.wall / max(four.server_busy, four.trainer_busy)
    found = []
    if ratio > RATIO:
        found.append(f"wall(4)/wall(0) is {ratio:.2f}, more than {RATIO}")
    if overhead > OVERHEAD:
        found.append(f"wall(4)/max(server busy, trainer busy) is {overhead:.2f}, more than {OVERHEAD}")
    if zero.samples != four.samples:
        found.append("the two runs did not consume the same samples")
    if zero.voided or four.voided:
        found.append(f"{zero.voided} and {four.voided} groups lost")
    return found


def show(name: str, run: Measured) -> dict[str, Any]:
    print(
        f"{name}: wall {run.wall:6.2f} s, server busy {run.server_busy:6.2f} s, "
        f"trainer busy {run.trainer_busy:6.2f} s, {len(run.samples)} samples, "
        f"staleness up to {run.staleness_max:.0f}, {run.voided} groups lost",
        flush=True,
    )
    return dataclasses.asdict(run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--check", action="store_true", help="exit 1 where a number is missed")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-async-") as directory:
        home = Path(directory)
        subprocess.run(
            [sys.executable, "-m", "launcher", "make-model", str(home / "tiny"), "--pictures", str(home / "pictures")],
            cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=120,
        )  # fmt: skip
        zero, four = (measure(home, offpolicyness, arguments.steps) for offpolicyness in (0, 4))
    show("max_head_offpolicyness 0", zero)
    show("max_head_offpolicyness 4", four)
    print(f"wall(4) / wall(0) = {four.wall / zero.wall:.2f}")
    print(f"wall(4) / max(server busy, trainer busy) = {four.wall / max(four.server_busy, four.trainer_busy):.2f}")
    found = verdict(zero, four)
    for line in found:
        print(f"✗ {line}")
    return int(arguments.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
