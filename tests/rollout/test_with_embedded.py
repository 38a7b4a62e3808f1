"""The rollout service with the real embedded server and data service: ids and logprobs are transformers' own."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from core.config import Config, load
from core.data.pictures import write_pictures
from core.data.tokenizer import Tokenizer
from core.inference import SGLangClient
from core.rl.trajectory import Sample, decode_samples
from core.rollout.session import Session
from core.rpc.client import AsyncClient
from core.rpc.service import Call, Service
from launcher.roles.data import make_service
from launcher.roles.tiny.checkpoint import TinyModel, write_checkpoint
from tests.embedded.harness import TOKEN, Reference, Remote, serving
from tests.rollout.stub_run import Run, StubDaemon, places_in

torch.set_num_threads(1)

CONFIG = """
experiment_name: real
trial_name: run
allocation_mode: embedded:d1+archon:d1
reward: exact_match
seed: 5
cluster: {{fileroot: {root}}}
train_dataset: {{path: {root}/pictures, split: train, batch_size: 2, num_workers: 1}}
valid_dataset: {{path: {root}/pictures, split: test, dataset_kwargs: {{max_rows: 6}}}}
gconfig: {{n_samples: 3, max_new_tokens: {new}, temperature: 0.7, min_new_tokens: 2}}
actor: {{path: {root}/model-0}}
rollout: {{max_head_offpolicyness: 0}}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    for seed in range(2):
        write_checkpoint(root / f"model-{seed}", TinyModel(jitter=0.1, seed=seed, initializer_range=0.1))
    write_pictures(root / "pictures", seed=1, counts={"train": 12, "dev": 1, "test": 6})
    return root


class RealDaemon(StubDaemon):
    """Its one server is real; version i is the directory model-i."""

    def __init__(self, remote: Remote, root: Path) -> None:
        super().__init__([])
        self.remote, self.root = remote, root

    async def _registry(self, call: Call) -> dict:
        row = {"name": "server-0", "url": self.remote.url, "backend": "embedded", "daemon": self.service.url}
        return {"services": {"data": self.data_url}, "servers": [{**row, "state": "up", "started": 1.0}]}

    async def _fetch(self, call: Call) -> dict:
        version = int(call.json()["name"][1:7])
        return {"path": str(self.root / f"model-{version}"), "bytes": 1, "secs": 0.0, "cached": False}


class RealRun(Run):
    async def start_session(self, attempt: int = 1) -> None:
        tokenizer = Tokenizer(self.config.actor.path)
        options: dict[str, Any] = {"token": TOKEN, "daemon": self.daemon.service.url, "attempt": attempt}
        self.session = Session(self.config, places_in(self.root), tokenizer, context_length=512, **options)
        await self.serve_session()


def scored(reference: Reference, sample: Sample, picture: Image.Image, prompt: dict[str, Any]) -> np.ndarray:
    """Log-probability of each sampled id under softmax(logits / temperature), placeholders and early ends at -inf."""
    logits = reference.logits(prompt["input_ids"], [picture], sample.sampled_ids.tolist()).double() / 0.7
    logits[:, [reference.image, reference.video]] = -torch.inf
    logits[:2, list(Tokenizer(reference.directory).stop_ids)] = -torch.inf
    rows = torch.log_softmax(logits, dim=-1)
    return rows[torch.arange(len(rows)), torch.tensor(sample.sampled_ids.tolist())].numpy()


def config_of(made: Path, new: int) -> Config:
    path = made / f"config-{new}.yaml"
    path.write_text(CONFIG.format(root=made, new=new))
    return load(path, [])


@pytest.mark.parametrize("new", [6, 20])  # whole answers, and streamed ones
def test_logprobs_are_those_of_the_distribution_sampled_from_at_each_version(
    made: Path, tmp_path: Path, new: int
) -> None:
    config = config_of(made, new)

    async def go(remote: Remote) -> None:
        data = make_service(config, "embedded", cache=tmp_path / "cache", run_images=None)
        service, daemon = Service("data", TOKEN), RealDaemon(remote, made)
        data.add_routes(service)
        daemon.data_url = await service.start()
        await daemon.service.start()
        run = RealRun(tmp_path, config, [], daemon, None)  # type: ignore[arg-type]
        await run.start_session()
        client = AsyncClient(daemon.data_url, TOKEN)
        try:
            for version in range(2):
                await run.serve(version)
                await run.batch(version + 1)
                samples, _ = decode_samples(await run.samples(version + 1, range(6)))
                reference = Reference(made / f"model-{version}")
                assert len({tuple(sample.sampled_ids) for sample in samples}) > 1, "answers differ"
                for sample in samples:
                    position = int(sample.group_id.split("-")[1])
                    asked = await client.get("/prompts", split="train", epoch=0, position=position, n=1)
                    prompt = asked["prompts"][0]
                    assert sample.prompt_ids.tolist() == prompt["expanded_ids"]
                    assert set(sample.versions.tolist()) == {version} and len(sample.sampled_ids) >= 2
                    picture = Image.open(io.BytesIO(await client.get_bytes(f"/images/{sample.images[0].hash}")))
                    expected = scored(reference, sample, picture, prompt)
                    assert np.abs(sample.logprobs - expected).max() < 2e-5
            await run.client.post("/evaluate", {"id": "e", "step": 1, "split": "valid", "hold_publishing": True})
            result = await run.client.get("/evaluations/e", wait=30, timeout=40)
            assert result["done"] and result["rows"] == 6 and result["failed"] == 0 and result["version_min"] == 1
        finally:
            await run.stop_session()
            await client.close()
            await daemon.service.stop()
            await service.stop()
            await data.close()

    with serving(made / "model-0", max_running_requests=16) as remote:
        asyncio.run(asyncio.wait_for(go(remote), 100))


def test_the_client_alone_answers_a_question_about_a_picture(made: Path, tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (90, 70, 3), dtype=np.uint8)).save(picture)

    async def go(remote: Remote) -> None:
        client = SGLangClient(remote.url, TOKEN)
        prompt = {"image_path": str(picture), "text": "How many?"}
        first = await client.generate(prompt=prompt, max_new_tokens=5, temperature=0.0)
        again = await client.generate(prompt=prompt, max_new_tokens=5, temperature=0.0)
        assert isinstance(first["text"], str) and first["output_ids"] == again["output_ids"]
        assert first["prompt_ids"].count(Tokenizer(made / "model-0").token_id("<|image_pad|>")) == 6  # 84 x 56 pixels
        reference = Reference(made / "model-0")
        tokenizer = Tokenizer(made / "model-0")
        content = [{"type": "image"}, {"type": "text", "text": "How many?"}]
        ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": content}]))
        resized = Image.open(picture).resize((56, 84), Image.Resampling.BICUBIC)
        stops = list(tokenizer.stop_ids)
        expected = reference.greedy(ids, [resized], 5, eos_token_id=stops)
        assert first["output_ids"] == expected
        await client.close()

    with serving(made / "model-0") as remote:
        asyncio.run(asyncio.wait_for(go(remote), 60))
