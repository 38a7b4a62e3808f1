"""Every layout computes what one process computes: loss, scores, gradients, moments, and the weights after updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from core.parallel.mesh import Degrees
from tests.parallel import jobs
from tests.parallel.pool import Pool, RankError

pytestmark = pytest.mark.timeout(90)
Measure = Callable[..., dict[str, Any]]


@dataclass(frozen=True)
class Layout:
    degrees: Degrees
    cp_style: str = "ulysses"


LAYOUTS = {
    "dp2": Layout(Degrees(dp_shard=2)),
    "dp4": Layout(Degrees(dp_shard=4)),
    "hsdp2x2": Layout(Degrees(dp_replicate=2, dp_shard=2)),
    "tp2": Layout(Degrees(tp=2)),
    "tp4, more than kv heads": Layout(Degrees(tp=4)),
    "dp2 tp2": Layout(Degrees(dp_shard=2, tp=2)),
    "cp2 ulysses": Layout(Degrees(cp=2)),
    "cp2 allgather": Layout(Degrees(cp=2), "allgather"),
    "cp4 ulysses": Layout(Degrees(cp=4)),
    "cp4 allgather": Layout(Degrees(cp=4), "allgather"),
    "dp2 cp2": Layout(Degrees(dp_shard=2, cp=2)),
    "cp2 tp2 ulysses": Layout(Degrees(cp=2, tp=2)),
    "cp2 tp2 allgather": Layout(Degrees(cp=2, tp=2), "allgather"),
    "dp2 cp2 tp2": Layout(Degrees(dp_shard=2, cp=2, tp=2)),
}
# one unit or a unit a layer, which ranks have images, checkpointing
FEATURES: dict[str, dict[str, Any]] = {
    "one unit": {},
    "all recomputed, images on one rank": {"one_unit": False, "checkpointing": "full", "images": "one"},
    "some recomputed, no images": {"one_unit": False, "checkpointing": "selective", "images": "none"},
    "every second recomputed, tower frozen": {
        "one_unit": False,
        "checkpointing": "selective",
        "every": "2",
        "freeze_vision": True,
    },
}
CASES = {f"{head}, {name}": {"model": head, **case} for head in ("tied", "untied") for name, case in FEATURES.items()}


def distance(a: Tensor, b: Tensor) -> float:
    """max|a-b| / max|b|; two tensors of zeros are equal."""
    assert a.shape == b.shape
    difference, scale = (a.double() - b.double()).abs().max().item(), b.double().abs().max().item()
    return 0.0 if difference == 0.0 else difference / max(scale, 1e-300)


def compare(found: dict[str, Any], expected: dict[str, Any], tolerance: float, *keys: str) -> None:
    far = []
    for key in keys:
        if isinstance(expected[key], Tensor):
            pairs = {key: (found[key], expected[key])}
        else:
            assert found[key].keys() == expected[key].keys(), key
            pairs = {f"{key} {name}": (found[key][name], expected[key][name]) for name in expected[key]}
        far += [f"{name}: {d:.1e}" for name, (a, b) in pairs.items() if not (d := distance(a, b)) <= tolerance]
    assert not far, "\n".join(far)


def settings(checkpoints: dict[str, Path], case: dict[str, Any]) -> dict[str, Any]:
    return {"path": checkpoints[case["model"]], **{name: value for name, value in case.items() if name != "model"}}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_is_that_of_one_process(
    pool: Pool, checkpoints: dict[str, Path], one_process: Measure, name: str, case: str
) -> None:
    layout, chosen = LAYOUTS[name], settings(checkpoints, CASES[case])
    found = pool.run(jobs.measure, layout.degrees, cp_style=layout.cp_style, **chosen)
    plain = {key: value for key, value in chosen.items() if key in ("path", "images", "freeze_vision")}
    expected = one_process(**plain)
    compare(found, expected, 1e-5, "loss", "grad_norm", "logp", "entropy", "gradients", "moments")


@pytest.mark.parametrize("name", LAYOUTS)
def test_three_steps_in_float64_end_at_the_same_weights(
    pool: Pool, checkpoints: dict[str, Path], one_process: Measure, name: str
) -> None:
    layout = LAYOUTS[name]
    chosen = {"path": checkpoints["tied"], "dtype": "float64", "steps": 3}
    found = pool.run(jobs.measure, layout.degrees, cp_style=layout.cp_style, **chosen)
    compare(found, one_process(**chosen), 1e-9, "loss", "grad_norm", "logp", "weights", "moments")


@pytest.mark.parametrize("name", ["dp2 cp2 tp2", "cp2 tp2 allgather"])
def test_layouts_run_on_deterministic_algorithms(pool: Pool, checkpoints: dict[str, Path], name: str) -> None:
    """Twice the same bits; an operation without a deterministic form would raise."""
    layout = LAYOUTS[name]
    chosen = {"path": checkpoints["tied"], "one_unit": False, "cp_style": layout.cp_style, "deterministic": True}
    first, second = (pool.run(jobs.measure, layout.degrees, **chosen) for _ in range(2))
    for key in ("logp", "gradients", "moments"):
        assert all(torch.equal(value, second[key][tensor]) for tensor, value in first[key].items())


def test_whole_tensors_have_every_row(pool: Pool, checkpoints: dict[str, Path], one_process: Measure) -> None:
    """A guard of the suite itself: what is compared has the sizes of the uncut model."""
    expected = one_process(path=checkpoints["tied"])
    assert expected["weights"]["model.layers.0.self_attn.k_proj.weight"].shape == (16, 32)
    assert expected["entropy"].keys() == expected["logp"].keys()
    assert all(torch.isfinite(gradient).all() for gradient in expected["gradients"].values())


def test_a_hang_is_a_failure() -> None:
    pool = Pool()
    try:
        with pytest.raises(RankError, match=r"rank 0 of .* gave no answer in 1 s"):
            pool.run(jobs.hang, Degrees(dp_shard=2), deadline=1.0)
    finally:
        pool.stop()
