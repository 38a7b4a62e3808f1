"""A run directory as a short run leaves it, written through the project's own writers."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from core.rl.trajectory import ImageRef, Sample, encode_samples
from core.telemetry.files import append_line, write_atomic
from launcher.run_dir import RunDir

HASHES = ("a1" * 16, "b2" * 16)
TEXT = "<script>alert('x')</script> & \\boxed{3}"


def sample(group: int, i: int, reward: float, step: int, **changed: object) -> Sample:
    values: dict = {
        "sample_id": f"0-{group}-{i}",
        "group_id": f"0-{group}",
        "prompt_id": f"train-{group}",
        "epoch": 0,
        "prompt_ids": np.arange(5, dtype=np.int32),
        "sampled_ids": np.arange(3, dtype=np.int32),
        "logprobs": np.full(3, -0.5, np.float32),
        "versions": np.array([step - 1, step - 1, step], np.int32),
        "finish_reason": "stop",
        "reward": reward,
        "started_version": step - 1,
        "images": (ImageRef(HASHES[group % 2], (84, 84), (84, 84), (1, 6, 6)),),
        "prompt_text": "How many <b>red</b> shapes?",
        "text": TEXT,
    }
    return Sample(**{**values, **changed})


def step_record(step: int) -> dict:
    return {
        "kind": "step",
        "step": step,
        "version": step,
        "time": 1000.0 + 2.0 * step,
        "loss": -0.1 * step,
        "grad_norm": 1.0,
        "reward_mean": step / 10,
        "reward_std": 0.2,
        "accuracy": step / 10,
        "entropy": 0.5,
        "prox_ratio_max": 1e-7 * step,
        "staleness_mean": 0.5,
        "staleness_max": step % 3,
        "groups": 4,
        "samples": 16,
        "tokens": 100,
        "tokens_per_s_train": 500.0,
        "tokens_per_s_rollout": 300.0,
        "secs": {"step": 2.0, "wait_batch": 0.5, "forward_backward": 1.0, "publish": 0.25},
        "sync_secs": 0.1 * step,
        "sync_version": step,
        "wait_rollout_secs": 0.5,
        "wait_trainer_secs": 0.25,
        "equal_reward_groups": 1,
        "truncated_fraction": 0.0,
        "void": {"failed": 1},
        "reward_errors": {"timeout": 2} if step == 2 else {},
        "rss_mb": 400 + step,
        "eta_secs": 60.0 - step,
    }


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "exp" / "t0")
    run.create()
    write_atomic(run.config, "experiment_name: exp\ntrial_name: t0\ntype: rl\n")
    write_atomic(run.state, json.dumps({"phase": "done", "attempt": 2, "error": None}))
    for step in range(1, 6):
        append_line(run.metrics, step_record(step))
    for name, at, accuracy in (("valid", 0, 0.25), ("valid", 5, 0.75), ("valid-shuffled", 5, 0.2)):
        append_line(
            run.metrics,
            {"kind": "eval", "name": name, "step": at, "accuracy": accuracy, "reward_mean": accuracy, "rows": 8}
            | {"version_min": at, "version_max": at, "secs": 1.5},
        )
    append_line(run.metrics, {"kind": "note", "time": 1.0, "level": "warning", "message": "a <note>"})
    for name in HASHES:
        picture = io.BytesIO()
        Image.new("RGB", (84, 84), "red").save(picture, "PNG")
        write_atomic(run.images / f"{name}.png", picture.getvalue())
    for step in (1, 2, 3, 4, 5):
        samples = [sample(group, i, float(i % 2), step) for group in range(2) for i in range(4)]
        write_atomic(run.batches / f"{step:06d}.safetensors", encode_samples(samples, {"step": step}))
    append_line(run.void, {"reason": "bad row", "prompt_id": "train-9", "message": "rows.parquet:9: <animated>"})
    append_line(run.void, {"reason": "failed", "prompt_id": "train-7"})
    append_line(run.void, {"reason": "failed", "prompt_id": "train-8"})
    return run
