"""A checkpoint of one layout is loaded by another, bit for bit; a cut model publishes whole tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.parallel.mesh import Degrees
from tests.parallel import jobs
from tests.parallel.pool import Pool

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", params=["tied", "untied"])
def model(request: pytest.FixtureRequest, checkpoints: dict[str, Path]) -> Path:
    return checkpoints[request.param]


@pytest.fixture(scope="module")
def saved(pool: Pool, model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("checkpoints")
    return root, pool.run(jobs.save, Degrees(dp_shard=2, tp=2), path=model, root=root)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    "degrees",
    [Degrees(cp=2, tp=2), Degrees(dp_shard=4), Degrees(tp=4), Degrees(dp_replicate=2, dp_shard=2), Degrees()],
    ids=["cp2 tp2", "dp4", "tp4", "hsdp2x2", "one"],
)
def test_state_of_dp2_tp2_is_bit_equal_elsewhere(
    pool: Pool, model: Path, saved: tuple[Path, dict[str, Any]], degrees: Degrees
) -> None:
    root, expected = saved
    found = pool.run(jobs.load, degrees, path=model, root=root)
    assert same(found["weights"], expected["weights"]) and same(found["moments"], expected["moments"])
    assert found["updates"] == expected["updates"] and found["place"] == 5
    one = pool.run(jobs.load, Degrees(), path=model, root=root)
    assert abs(found["loss"] - one["loss"]) <= 1e-4 * abs(one["loss"])


def test_published_tensors_are_whole_and_each_written_once(saved: tuple[Path, dict[str, Any]], model: Path) -> None:
    _, expected = saved
    names = [name for name, _ in expected["published"]]
    assert len(names) == len(set(names))
    assert same(dict(expected["published"]), expected["weights"])
