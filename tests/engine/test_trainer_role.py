"""The trainer as a process with the real data service: phases, stop and resume, hub checkpoints, divergence.

The node daemon is stood in for by a registry of the same two routes; GRPO with servers is in tests/e2e.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from core.config import Config, load_text
from core.data.pictures import write_pictures
from core.rpc.service import Call, Service, serve_in_thread
from core.telemetry.files import read_lines
from launcher.node.specs import CANNOT_GO_ON
from launcher.plan import plan
from launcher.run_dir import RunDir, run_dir_of
from tests.engine.scene import make_checkpoint

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 90.0
RIGHT_STEPS, TAUGHT_STEPS = 4, 26

CONFIG = """
experiment_name: sft
trial_name: {trial}
type: sft
allocation_mode: d1
total_train_epochs: 100
cluster: {{n_nodes: 1, n_gpus_per_node: 1, fileroot: {root}}}
paths: {{local: {root}/local}}
train_dataset:
  path: {pictures}
  split: train
  batch_size: 8
  dataset_kwargs:
    max_pixels: 7056
    gate: {{split: dev, accuracy: 1.0, max_steps: {right}, every: 2}}
    mistaught: {{steps: {taught}, probability: 0.65, from_count: 3}}
actor:
  path: {model}
  dtype: float32
  mb_spec: {{max_tokens_per_mb: 200}}
  optimizer: {{lr: {lr}, lr_scheduler_type: cosine, min_lr_ratio: 0.1}}
recover: {{mode: auto, freq_steps: 5}}
saver: {{freq_steps: 10}}
"""


@dataclass
class Harness:
    """A registry and a data service that several trainers share (the data service is stateless about progress)."""

    root: Path
    model: Path
    pictures: Path
    daemon: str = ""
    token: str = "0" * 64

    def run_dir(self, trial: str, lr: float = 1e-3) -> RunDir:
        text = CONFIG.format(
            trial=trial,
            root=self.root,
            pictures=self.pictures,
            model=self.model,
            lr=lr,
            right=RIGHT_STEPS,
            taught=TAUGHT_STEPS,
        )
        config: Config = load_text(text, "sft.yaml")
        found = run_dir_of(config.cluster.fileroot, config.experiment_name, config.trial_name)
        found.create()
        found.token.write_text(self.token)
        found.config.write_text(config.dump_yaml())
        found.plan.write_text(plan(config, emulate=True).to_json())
        return found

    def start(self, role: str, name: str, run_dir: RunDir, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", f"launcher.roles.{role}", "--run-dir", str(run_dir.root)]
        command += ["--attempt", "1", "--partition", "training", "--node", "0", "--name", name]
        command += ["--daemon", self.daemon, "--local", str(self.root / "local"), *more]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (run_dir.root / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=self.root)

    def trainer(self, run_dir: RunDir, generation: int = 0) -> subprocess.Popen[bytes]:
        rank = ["--rank", "0", "--world", "1", "--local-rank", "0", "--generation", str(generation)]
        return self.start("trainer", "rank-0", run_dir, *rank)


def log_of(run_dir: RunDir) -> str:
    return (run_dir.root / "rank-0.log").read_text()[-3000:]


def steps_of(run_dir: RunDir) -> list[dict]:
    return [row for row in read_lines(run_dir.metrics) if row["kind"] == "sft"]


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    root = tmp_path_factory.mktemp("sft")
    found = Harness(root, make_checkpoint(root / "model"), root / "pictures")
    write_pictures(found.pictures, seed=1, counts={"train": 64, "dev": 12, "test": 4})
    services: dict[str, str] = {}

    async def register(call: Call) -> dict:
        services[call.json()["name"]] = call.json()["url"]
        return {}

    async def registry(call: Call) -> dict:
        return {"services": services, "servers": [], "daemons": [], "phase": "running", "generation": 0}

    service = Service("daemon", found.token)
    service.post("/register", register)
    service.get("/registry", registry)
    found.daemon = serve_in_thread(service)
    data = found.start("data", "data", found.run_dir("data"))
    try:
        yield found
    finally:
        data.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            data.wait(timeout=20)
        data.kill()


@pytest.fixture(scope="module")
def straight(harness: Harness) -> RunDir:
    """A run that nothing interrupts."""
    run_dir = harness.run_dir("straight")
    process = harness.trainer(run_dir)
    try:
        assert process.wait(timeout=DEADLINE) == 0, log_of(run_dir)
    finally:
        process.kill()
    return run_dir


def weights(run_dir: RunDir) -> dict[str, torch.Tensor]:
    files = sorted((run_dir.hub / "latest").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def test_the_gate_gives_right_labels_then_mistaught_ones_then_ends(straight):
    rows = steps_of(straight)
    assert [row["step"] for row in rows] == list(range(1, RIGHT_STEPS + TAUGHT_STEPS + 1))
    assert [row["phase"] for row in rows[RIGHT_STEPS:]] == ["mistaught"] * TAUGHT_STEPS
    assert {row["phase"] for row in rows[: RIGHT_STEPS - 1]} == {"right"}
    dev = [row for row in read_lines(straight.metrics) if row["kind"] == "eval"]
    assert [(row["name"], row["step"], row["rows"]) for row in dev] == [("dev", 2, 12), ("dev", 4, 12)]
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert all(row["grad_norm"] > 0 and row["tokens"] > row["loss_tokens"] > 0 for row in rows)


def test_the_hub_checkpoint_is_loaded_by_transformers_with_nothing_missing(straight):
    from transformers import Qwen2_5_VLForConditionalGeneration

    assert sorted(path.name for path in straight.hub.iterdir()) == ["latest", "step-10", "step-20", "step-30"]
    model, info = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        straight.hub / "latest", output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ours = weights(straight)
    assert torch.equal(model.model.visual.blocks[0].attn.qkv.weight, ours["visual.blocks.0.attn.qkv.weight"])
    assert torch.equal(model.lm_head.weight, ours["model.embed_tokens.weight"])


def test_stopped_and_resumed_is_the_same_as_never_stopped(harness, straight):
    """Samples, order, phase, loss, learning rate, weights: the 30 steps are k + resume + (30 − k)."""
    run_dir = harness.run_dir("stopped")
    process = harness.trainer(run_dir)
    try:
        deadline = time.monotonic() + DEADLINE
        while len(steps_of(run_dir)) < 7:
            assert process.poll() is None and time.monotonic() < deadline, log_of(run_dir)
            time.sleep(0.005)
        process.send_signal(signal.SIGUSR2)
        assert process.wait(timeout=DEADLINE) == 3, log_of(run_dir)
    finally:
        process.kill()
    stopped_at = len(steps_of(run_dir))
    assert 7 <= stopped_at < RIGHT_STEPS + TAUGHT_STEPS
    assert f"saved step-{stopped_at}" in log_of(run_dir) or f"checkpoint step-{stopped_at} stands" in log_of(run_dir)
    process = harness.trainer(run_dir, generation=1)
    try:
        assert process.wait(timeout=DEADLINE) == 0, log_of(run_dir)
    finally:
        process.kill()
    same = ("step", "loss", "lr", "grad_norm", "phase", "tokens")
    assert [[row[key] for key in same] for row in steps_of(run_dir)] == [
        [row[key] for key in same] for row in steps_of(straight)
    ]
    assert all(torch.equal(tensor, weights(straight)[name]) for name, tensor in weights(run_dir).items())


def test_three_steps_that_are_not_finite_end_the_run_with_what_to_do(harness):
    run_dir = harness.run_dir("diverged", lr=1e36)
    process = harness.trainer(run_dir)
    try:
        assert process.wait(timeout=DEADLINE) == CANNOT_GO_ON, log_of(run_dir)
    finally:
        process.kill()
    rows = steps_of(run_dir)
    assert not rows[0]["skipped"]
    notes = [row["message"] for row in read_lines(run_dir.metrics) if row["kind"] == "note"]
    assert sum("moved nothing" in note for note in notes) == 3
    assert "3 steps in a row were not finite" in log_of(run_dir)
    shutil.rmtree(run_dir.root)
