"""Damage in random places of checkpoints and weight versions: refused, or the one before is taken; never loaded."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable
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
    other = draw.choice([each for each in others if each.read_bytes() != path.read_bytes()])
    path.write_bytes(other.read_bytes())
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


def publish_two_shards(root: Path, name: str, base: Path, seed: int) -> Manifest:
    """What two ranks publish, one after the other, with their answers exchanged by hand."""
    made = torch.Generator().manual_seed(seed)
    tensors = {f"model.layers.{i}.weight": torch.randn(40, 24, generator=made) for i in range(6)}
    return publish(
        root, name, tensors, base, rank=0, world=1, gather=gather, barrier=lambda: None,
        version=seed, generation=0, lineage=[(0, 0)],
    )  # fmt: skip


def test_no_damaged_weight_version_is_fetched(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "model")
    good = {}
    for seed, name in ((1, "v000001-r0"), (2, "v000002-r0")):
        good[name] = publish_two_shards(tmp_path / "weights", name, base, seed)
    name, draw, hit = "v000002-r0", random.Random(6), Counter()
    names = sorted(path.name for path in (tmp_path / "weights" / name).iterdir())
    for number in range(PLACES):
        root, local = tmp_path / "damaged", tmp_path / "local"
        shutil.copytree(tmp_path / "weights", root)
        path = root / name / names[number % len(names)]
        others = [*(root / "v000001-r0").iterdir(), *(root / name).iterdir()]
        damage = draw.choice(DAMAGES)
        said = damage(path, draw, others)
        hit[path.name, damage.__name__] += 1
        with pytest.raises(WeightsError):
            fetch(root / name, good[name].digest, local, visible_secs=0)
            pytest.fail(f"{path.name}, {said}: fetched all the same")
        assert not local.exists() or list(local.iterdir()) == []
        assert fetch(root / "v000001-r0", good["v000001-r0"].digest, local).name == "v000001-r0"
        shutil.rmtree(root)
        shutil.rmtree(local)
    assert {each for each, _ in hit} == set(names) and {kind for _, kind in hit} == {d.__name__ for d in DAMAGES}
