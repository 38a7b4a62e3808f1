"""Damage in random places of checkpoints and weight versions: refused, or the one before is taken; never loaded."""

from __future__ import annotations

import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from core.engine import checkpoint as checkpoints
from core.weights.errors import WeightsError
from core.weights.fetch import fetch
from core.weights.manifest import Manifest
from core.weights.publish import publish
from tests.engine.scene import ADAM, alone, make_batch, make_checkpoint, make_engine, policy_step, whole

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:torch.distributed is")]
PLACES = 100  # of checkpoints, and as many of weight versions


def flip(path: Path, draw: random.Random, others: list[Path]) -> str:
    data = bytearray(path.read_bytes())
    place = draw.randrange(len(data))
    data[place] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    return f"bit flip at {place}"


def cut(path: Path, draw: random.Random, others: list[Path]) -> str:
    size = draw.randrange(path.stat().st_size)
    path.write_bytes(path.read_bytes()[:size])
    return f"cut to {size} bytes"


def swap(path: Path, draw: random.Random, others: list[Path]) -> str:
    """With another of its own directory or of the one before, as draw has it; shards with shards where there are."""
    alike = [each for each in others if each.suffix == path.suffix and each.read_bytes() != path.read_bytes()]
    other = draw.choice(alike or [each for each in others if each.read_bytes() != path.read_bytes()])
    mine, its = path.read_bytes(), other.read_bytes()
    path.write_bytes(its)
    if other.parent == path.parent:
        other.write_bytes(mine)
    return f"swapped with {other}"


def remove(path: Path, draw: random.Random, others: list[Path]) -> str:
    path.unlink()
    return "removed"


DAMAGES: list[Callable[[Path, random.Random, list[Path]], str]] = [flip, cut, swap, remove]


def gather(value: object) -> list:
    return [value]


def test_no_damaged_checkpoint_is_loaded(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    engine, batch = make_engine(model, alone(), optimizer=ADAM), make_batch(model)
    states = {}
    for step in (1, 2):
        policy_step(engine, batch, lr=1e-2)
        checkpoints.save(tmp_path / "saved", step, engine, {"data": step}, keep=2, gather=gather)
        states[step] = {name: tensor.clone() for name, tensor in whole(engine).items()}
    assert any(not torch.equal(states[1][name], states[2][name]) for name in states[1])
    draw, hit = random.Random(5), Counter()
    names = sorted(path.name for path in (tmp_path / "saved" / "step-2").iterdir())
    for number in range(PLACES):
        root = tmp_path / "damaged"
        shutil.copytree(tmp_path / "saved", root, symlinks=True)
        path = root / "step-2" / names[number % len(names)]
        others = [*(root / "step-1").iterdir(), *(root / "step-2").iterdir()]
        damage = draw.choice(DAMAGES)
        said = damage(path, draw, others)
        hit[path.name, damage.__name__] += 1
        loaded = checkpoints.load(root, engine, gather=gather)
        assert loaded is not None and loaded.step == 1, f"{path.name}, {said}: loaded all the same"
        assert "step-2 cannot be used" in loaded.warnings[0]
        now = whole(engine)
        assert all(torch.equal(now[name], states[1][name]) for name in now), f"{path.name}, {said}"
        shutil.rmtree(root)
    assert {name for name, _ in hit} == set(names) and {kind for _, kind in hit} == {d.__name__ for d in DAMAGES}


def test_a_checkpoint_under_another_steps_name_is_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    engine = make_engine(model, alone(), optimizer=ADAM)
    for step in (1, 2):
        checkpoints.save(tmp_path / "saved", step, engine, {"data": step}, keep=2, gather=gather)
    shutil.rmtree(tmp_path / "saved" / "step-2")
    shutil.copytree(tmp_path / "saved" / "step-1", tmp_path / "saved" / "step-2")
    loaded = checkpoints.load(tmp_path / "saved", engine, gather=gather)
    assert loaded is not None and loaded.step == 1


class TwoRanks:
    """What two ranks tell each other, between two threads."""

    def __init__(self) -> None:
        self._said: list[object] = [None, None]
        self._meet = threading.Barrier(2, timeout=60)

    def gather(self, rank: int, value: object) -> list:
        self._said[rank] = value
        self._meet.wait()
        answers = list(self._said)
        self._meet.wait()
        return answers

    def barrier(self) -> None:
        self._meet.wait()


def publish_two_shards(root: Path, name: str, base: Path, seed: int) -> Manifest:
    made = torch.Generator().manual_seed(seed)
    tensors = {f"model.layers.{i}.weight": torch.randn(40, 24, generator=made) for i in range(6)}
    ranks = TwoRanks()

    def one(rank: int) -> Manifest:
        mine = dict(list(tensors.items())[rank::2])
        return publish(
            root, name, mine, base, rank=rank, world=2, gather=lambda value: ranks.gather(rank, value),
            barrier=ranks.barrier, version=seed, generation=0, lineage=[(0, 0)],
        )  # fmt: skip

    with ThreadPoolExecutor(2) as pool:
        manifests = list(pool.map(one, range(2)))
    assert manifests[0].digest == manifests[1].digest
    return manifests[0]


def test_no_damaged_weight_version_is_fetched(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "model")
    good = {}
    for seed, name in ((1, "v000001-r0"), (2, "v000002-r0")):
        good[name] = publish_two_shards(tmp_path / "weights", name, base, seed)
    name, draw, hit = "v000002-r0", random.Random(6), Counter()
    names = sorted(path.name for path in (tmp_path / "weights" / name).iterdir())
    shards = [each for each in names if each.endswith(".safetensors")]
    assert len(shards) == 2
    within = 0  # swaps of one shard with the other of the same version
    for number in range(PLACES):
        root, local = tmp_path / "damaged", tmp_path / "local"
        shutil.copytree(tmp_path / "weights", root)
        path = root / name / names[number % len(names)]
        others = [*(root / "v000001-r0").iterdir(), *(root / name).iterdir()]
        damage = draw.choice(DAMAGES)
        said = damage(path, draw, others)
        hit[path.name, damage.__name__] += 1
        within += path.name in shards and said.endswith(tuple(f"{name}/{each}" for each in shards))
        with pytest.raises(WeightsError):
            fetch(root / name, good[name].digest, local, visible_secs=0)
            pytest.fail(f"{path.name}, {said}: fetched all the same")
        assert not local.exists() or list(local.iterdir()) == []
        assert fetch(root / "v000001-r0", good["v000001-r0"].digest, local).name == "v000001-r0"
        shutil.rmtree(root)
        shutil.rmtree(local)
    assert {each for each, _ in hit} == set(names) and {kind for _, kind in hit} == {d.__name__ for d in DAMAGES}
    assert within > 0
