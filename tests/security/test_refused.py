"""What is never taken in: pickles, oversized bodies, bombs, paths out of their root. Each against the real thing."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import urllib3

from core.config import ConfigError, load_text
from core.data.images import MAX_SOURCE_BYTES, ImageError, decode_png, load_image
from core.engine import checkpoint as checkpoints
from core.rl.trajectory import TrajectoryError, decode_samples
from core.rpc.client import Client
from core.rpc.errors import RpcError
from core.rpc.service import Service, serve_in_thread
from core.weights.errors import WeightsError
from core.weights.fetch import fetch, release
from core.weights.publish import publish
from launcher.node.fetches import Fetches
from tests.engine.scene import ADAM, alone, make_checkpoint, make_engine

TOKEN = "ab" * 32


class Bomb:
    """Unpickling it leaves a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return (open, (str(self.mark), "w"))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "it-was-unpickled"


def test_a_pickle_is_no_request_no_batch_no_picture_and_no_configuration(mark: Path, tmp_path: Path) -> None:
    body = pickle.dumps(Bomb(mark))
    service = Service("s", TOKEN)

    async def take(call) -> dict:
        return call.json()

    service.post("/take", take)
    url = serve_in_thread(service)
    reply = urllib3.request("POST", f"{url}/take", body=body, headers={"Authorization": f"Bearer {TOKEN}"})
    assert reply.status == 400
    with pytest.raises(TrajectoryError):
        decode_samples(body)
    with pytest.raises(ImageError):
        decode_png(body)
    with pytest.raises(ImageError):
        load_image(body)
    with pytest.raises(ConfigError):
        load_text(body.decode("latin-1"), "pickle.yaml")
    npy = io.BytesIO()
    np.save(npy, np.array([Bomb(mark)], dtype=object), allow_pickle=True)
    with pytest.raises(ImageError):
        load_image(npy.getvalue())
    assert not mark.exists()


def test_a_yaml_tag_runs_nothing(mark: Path) -> None:
    text = f"experiment_name: !!python/object/apply:builtins.open ['{mark}', 'w']\ntrial_name: t\n"
    with pytest.raises(ConfigError):
        load_text(text, "tag.yaml")
    assert not mark.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_checkpoint_whose_pickle_was_exchanged_is_not_opened(mark: Path, tmp_path: Path) -> None:
    """torch's own .metadata is a pickle: it is read only where the manifest's hash says that it is what we wrote."""
    engine = make_engine(make_checkpoint(tmp_path / "model"), alone(), optimizer=ADAM)
    for step in (1, 2):
        checkpoints.save(tmp_path / "c", step, engine, {}, keep=2, gather=lambda value: [value])
    (tmp_path / "c" / "step-2" / ".metadata").write_bytes(pickle.dumps(Bomb(mark)))
    loaded = checkpoints.load(tmp_path / "c", engine, gather=lambda value: [value])
    assert loaded is not None and loaded.step == 1
    assert not mark.exists()


def test_a_pickled_weight_file_reaches_no_server(mark: Path, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "model")
    manifest = publish(
        tmp_path / "w", "v000001-r0", {"a.weight": torch.ones(4)}, base, rank=0, world=1, gather=lambda v: [v],
        barrier=lambda: None, version=1, generation=0, lineage=[(0, 0)],
    )  # fmt: skip
    (tmp_path / "w" / "v000001-r0" / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    local = fetch(tmp_path / "w" / "v000001-r0", manifest.digest, tmp_path / "local", visible_secs=0)
    assert not (local / "pytorch_model.bin").exists() and not mark.exists()


def test_an_oversized_body_is_refused(tmp_path: Path) -> None:
    service = Service("s", TOKEN, max_body=1 << 16)

    async def take(call) -> dict:
        return {}

    service.post("/take", take)
    client = Client(serve_in_thread(service), TOKEN)
    with pytest.raises(RpcError) as caught:
        client.post("/take", {"text": "x" * (1 << 17)})
    assert caught.value.status == 413
    assert client.post("/take", {"text": "x"}) == {}


def test_a_yaml_bomb_is_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(ConfigError, match="aliases"):
        load_text("\n".join(lines), "bomb.yaml")


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header claims this size."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def test_an_image_bomb_is_refused_by_its_header() -> None:
    for size in ((60_000, 60_000), (100_000, 1_000), (1 << 30, 4)):
        with pytest.raises(ImageError):
            load_image(png_of(*size))
    with pytest.raises(ImageError, match="more than"):
        load_image(b"\0" * (MAX_SOURCE_BYTES + 1))


def test_paths_do_not_leave_their_root(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("secret")
    root = tmp_path / "rows"
    root.mkdir()
    for path in ("../token", "a/../../token", str(secret)):
        with pytest.raises(ImageError):
            load_image(path, root=root)
    fetches = Fetches(tmp_path / "weights", tmp_path / "local")
    for name, path in (("token", str(secret)), ("..", str(tmp_path)), ("v1", str(tmp_path / "weights" / ".." / "v1"))):
        with pytest.raises(RpcError) as caught:
            asyncio.run(fetches.get(name, path, "0" * 32))
        assert caught.value.status in (400, 409)
    for name in ("../token", "..", "", "."):
        with pytest.raises(WeightsError):
            release(tmp_path / "local", name)
    assert secret.read_text() == "secret"
    assert json.dumps(sorted(path.name for path in tmp_path.iterdir())) != "[]"
