"""The data process as a daemon starts it, and the limits that it takes from the configuration."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from core.config import Config, load
from core.data.hub import HubError
from core.data.rows import RowsError
from core.rpc.client import Client
from core.rpc.service import Call, Service
from launcher.node.specs import CANNOT_GO_ON
from launcher.plan import BatchPlan, Partition, Plan
from launcher.roles.data import image_workers, longest_prompt, splits
from launcher.run_dir import RunDir
from tests.data.conftest import WriteRows, good_row

REPOSITORY = Path(__file__).parents[2]


def config_of(tmp_path: Path, model: Path, rows: Path, *overrides: str) -> Config:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"experiment_name: data\ntrial_name: test\nallocation_mode: embedded:d1+d1\n"
        f"cluster: {{fileroot: {tmp_path}}}\nactor: {{path: {model}}}\n"
        f"train_dataset: {{path: {rows}, batch_size: 2}}\n"
    )
    return load(file, list(overrides))


def plan_of(backend: str) -> Plan:
    dims = {"d": 1, "p": 1, "t": 1, "c": 1, "e": 1}
    return Plan(
        run_id="data-test",
        device="cpu",
        emulate=True,
        swaps=[],
        warnings=[],
        partitions=[Partition(name="inference", backend=backend, nodes=[], **dims)],
        batch=BatchPlan(2, 2, 1, 1, 2, 1, 4096, None),
        memory=[],
        disk_bytes=0,
        not_built=[],
        notes=[],
        model={},
    )


def test_the_process_registers_serves_and_stops_on_sigterm(
    write_rows: WriteRows, tiny_path: Path, tmp_path: Path
) -> None:
    rows = write_rows([good_row(n) for n in range(5)])
    write_rows([good_row(n) for n in range(3)], "test")
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    config = config_of(tmp_path, tiny_path, rows, f"valid_dataset.path={rows}")
    run_dir.config.write_text(config.dump_yaml())
    run_dir.plan.write_text(plan_of("embedded").to_json())

    async def daemon() -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
        registered: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        async def register(call: Call) -> dict[str, Any]:
            registered.set_result(call.json())
            return {}

        service = Service("daemon", run_dir.read_token())
        service.post("/register", register)
        arguments = ["--run-dir", run_dir.root, "--attempt", "1", "--partition", "training", "--node", "0"]
        arguments += ["--name", "data", "--daemon", await service.start(), "--local", tmp_path / "local"]
        child = await asyncio.to_thread(
            subprocess.Popen,
            [sys.executable, "-P", "-m", "launcher.roles.data", *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
            cwd=tmp_path,
        )
        found = await asyncio.wait_for(registered, 60)
        await service.stop()
        return child, found

    child, found = asyncio.run(daemon())
    try:
        assert (found["name"], found["pid"]) == ("data", child.pid)
        client = Client(found["url"], run_dir.read_token())
        assert client.get("/info")["rows"] == {"train": 5, "valid": 3}
        prompts = client.get("/prompts", split="valid", n=10)["prompts"]
        assert len(prompts) == 3
        assert not any("error" in prompt for prompt in prompts)
        assert client.get("/status")["rows_processed"] >= 3
        assert list((tmp_path / "local" / "images").glob("*.png"))
        workers = psutil.Process(child.pid).children()
        assert workers
        client.close()
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0
        psutil.wait_procs(workers, timeout=10)
        assert not any(worker.is_running() for worker in workers)
    finally:
        if child.poll() is None:
            child.kill()
            child.wait(10)


@pytest.mark.parametrize(
    ("backend", "overrides", "longest", "key"),
    [
        ("embedded", [], 32768 - 512, "max_position_embeddings"),
        (
            "embedded",
            ["embedded.context_length=1000"],
            488,
            "embedded.context_length = 1000 less gconfig.max_new_tokens",
        ),
        ("sglang", ["sglang.context_length=2000"], 1488, "sglang.context_length"),
        ("vllm", ["vllm.max_model_len=3000"], 2488, "vllm.max_model_len"),
        ("vllm", ["train_dataset.max_length=100"], 100, "train_dataset.max_length"),
        ("embedded", ["type=sft", "train_dataset.max_length=100"], 100, "train_dataset.max_length"),
        (None, ["type=sft"], None, ""),
    ],
)
def test_the_smallest_limit_of_a_prompt_is_named(
    tmp_path: Path, tiny_path: Path, backend: str | None, overrides: list[str], longest: int | None, key: str
) -> None:
    config = config_of(tmp_path, tiny_path, tmp_path, "gconfig.max_new_tokens=512", *overrides)
    found, named = longest_prompt(config, backend)
    assert found == longest
    assert key in named


def test_splits_follow_the_configuration(write_rows: WriteRows, tmp_path: Path, tiny_path: Path) -> None:
    rows = write_rows([good_row(n) for n in range(5)])
    write_rows([good_row(n) for n in range(3)], "test")
    write_rows([good_row(n) for n in range(4)], "dev")
    overrides = [
        "type=sft",
        f"valid_dataset.path={rows}",
        "valid_dataset.dataset_kwargs.max_rows=2",
        "train_dataset.dataset_kwargs.system_prompt=Count.",
        "train_dataset.dataset_kwargs.gate.accuracy=0.9",
        "train_dataset.dataset_kwargs.mistaught.probability=0.5",
        "total_train_epochs=3",
    ]
    found = splits(config_of(tmp_path, tiny_path, rows, *overrides), None)
    assert {name: len(split.rows) for name, split in found.items()} == {"train": 5, "dev": 4, "valid": 2}
    train, valid = found["train"], found["valid"]
    assert (train.order.epoch_length, train.order.epochs, train.order.shuffle, train.order.seed) == (4, 3, True, 1)
    assert (valid.order.epoch_length, valid.order.epochs, valid.order.shuffle) == (2, 1, False)
    assert train.recipe.with_answer
    assert valid.recipe.system_prompt == "Count."
    assert train.mistaught == {"probability": 0.5, "from_count": 3}


def test_a_dataset_smaller_than_a_batch_is_refused(write_rows: WriteRows, tmp_path: Path, tiny_path: Path) -> None:
    config = config_of(tmp_path, tiny_path, write_rows([good_row()]))
    with pytest.raises(RowsError, match=r"1 training rows, less than one batch of train_dataset.batch_size = 2"):
        splits(config, "embedded")


def test_a_dataset_that_is_not_there_is_named(tmp_path: Path, tiny_path: Path) -> None:
    with pytest.raises(HubError, match="prepare"):
        splits(config_of(tmp_path, tiny_path, tmp_path / "none"), "embedded")
    with pytest.raises(RowsError, match="no parquet file at all"):
        splits(config_of(tmp_path, tiny_path, tmp_path), "embedded")


def test_data_that_is_gone_ends_the_process_for_good_without_a_traceback(tmp_path: Path, tiny_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    config = config_of(tmp_path, tiny_path, tmp_path / "gone")
    run_dir.config.write_text(config.dump_yaml())
    run_dir.plan.write_text(plan_of("embedded").to_json())
    words = ["--run-dir", run_dir.root, "--attempt", "1", "--partition", "training", "--node", "0", "--name", "data"]
    words += ["--daemon", "http://127.0.0.1:1", "--local", tmp_path / "local"]
    command = [sys.executable, "-P", "-m", "launcher.roles.data", *map(str, words)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == CANNOT_GO_ON
    assert done.stderr.startswith(f"HubError: dataset '{tmp_path / 'gone'}' is not on this machine"), done.stderr
    assert "Traceback" not in done.stderr


def test_image_workers_follow_num_workers(tmp_path: Path, tiny_path: Path) -> None:
    assert image_workers(config_of(tmp_path, tiny_path, tmp_path, "train_dataset.num_workers=3")) == 3
    assert 1 <= image_workers(config_of(tmp_path, tiny_path, tmp_path)) <= 8
