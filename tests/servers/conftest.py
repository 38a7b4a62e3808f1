"""The tiny model, its versions and one real server of each backend, one after the other."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from core.config import Config
from core.data.images import Picture, load_image
from core.weights.publish import publish
from launcher.roles.tiny.checkpoint import TinyModel, write_checkpoint
from launcher.servers.environment import installed
from tests.servers.own_model import OwnModel
from tests.servers.served import CONTEXT, LIMIT, Served, started

torch.set_num_threads(1)
BACKENDS = ("embedded", "vllm", "sglang")
CACHE = Path(os.environ.get("SERVER_ENVIRONMENTS", "~/.cache/vlm-rl")).expanduser()


def available(backend: str) -> bool:
    """Its environment is there; `make test` makes it first, and in CI nothing may be missing."""
    if backend == "embedded" or os.environ.get("CI") == "true":
        return True
    return bool(os.environ.get(f"{backend.upper()}_PYTHON")) or installed(backend, "cpu", CACHE) is not None


def configuration(model: Path) -> Config:
    return Config.model_validate(
        {
            "experiment_name": "servers",
            "trial_name": "contract",
            "allocation_mode": "vllm:d1+d1",
            "train_dataset": {"path": "nowhere", "batch_size": 1},
            "actor": {"path": str(model)},
            "vllm": {"max_model_len": CONTEXT, "max_num_seqs": LIMIT, "no_enable_prefix_caching": False},
            "sglang": {
                "context_length": CONTEXT,
                "max_running_requests": LIMIT,
                "disable_radix_cache": False,
                "max_prefill_tokens": 4096,
            },
            "paths": {
                "cache": str(CACHE),
                "vllm_python": os.environ.get("VLLM_PYTHON"),
                "sglang_python": os.environ.get("SGLANG_PYTHON"),
            },
        }
    )


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Served from the start; versions differ from it."""
    directory = tmp_path_factory.mktemp("servers") / "model"
    write_checkpoint(directory, shape(0))
    return directory


def shape(seed: int) -> TinyModel:
    return TinyModel(dtype="bfloat16", jitter=0.1, initializer_range=0.1, seed=seed)


@pytest.fixture(scope="session")
def versions(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """v1 and v2 share nothing; v3 is v2 with another tower."""
    made = {}
    for seed in (1, 2, 3):
        directory = tmp_path_factory.mktemp("checkpoints") / str(seed)
        write_checkpoint(directory, shape(seed))
        made[seed] = tensors(directory)
    towers = {name: tensor for name, tensor in made[3].items() if name.startswith("visual.")}
    assert towers and len(towers) < len(made[3])
    root = tmp_path_factory.mktemp("published")
    for number, content in ((1, made[1]), (2, made[2]), (3, {**made[2], **towers})):
        publish_alone(root, number, content, model)
    return {f"v{number:06d}-r0": root / f"v{number:06d}-r0" for number in (1, 2, 3)}


def publish_alone(root: Path, number: int, content: dict[str, torch.Tensor], model: Path, generation: int = 0) -> Path:
    name = f"v{number:06d}-r{generation}"
    publish(
        root,
        name,
        content,
        model,
        rank=0,
        world=1,
        gather=lambda item: [item],
        barrier=lambda: None,
        version=number,
        generation=generation,
        lineage=[(number, generation)],
    )
    return root / name


@pytest.fixture(scope="session")
def own(versions: dict[str, Path]) -> dict[str, OwnModel]:
    return {name: OwnModel(directory) for name, directory in versions.items()}


@pytest.fixture(scope="module", params=[backend for backend in BACKENDS if available(backend)])
def served(
    request: pytest.FixtureRequest,
    model: Path,
    versions: dict[str, Path],
    own: dict[str, OwnModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Served]:
    args = own["v000001-r0"].args
    banned = (args.image_token_id, args.video_token_id)
    log = tmp_path_factory.mktemp("logs") / f"{request.param}.log"
    with started(request.param, configuration(model), model, versions, banned, log) as server:
        yield server


def picture(width: int, height: int, seed: int) -> Picture:
    """As the data service hands it on: resized once, by us."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return load_image(as_png(pixels), min_pixels=4 * 28 * 28, max_pixels=200 * 28 * 28)


def as_png(pixels: np.ndarray) -> bytes:
    body = io.BytesIO()
    Image.fromarray(pixels).save(body, "PNG")
    return body.getvalue()
