"""`verify-parallel` as a user types it, and what it calls too far."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.engine.certificate import Distances, Work
from core.engine.documents import TokenRules
from core.engine.microbatch import Limits
from launcher.roles.verification.ranks import Spec, judge
from tests.support.runs import launcher

NONE = Distances(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.timeout(240)
def test_the_command_holds_layouts_against_one_process(tmp_path: Path) -> None:
    made = launcher("make-model", str(tmp_path / "tiny"), "--pictures", str(tmp_path / "pictures"), "--layers", "1")
    made.expect()
    words = ["verify-parallel", "configs/smoke.yaml", "--emulate", "--json", "--layouts", "d2", "c2t2", "--rows", "5"]
    words += [f"actor.path={tmp_path / 'tiny'}", f"paths.cache={tmp_path / 'cache'}"]
    words += [f"{side}_dataset.path={tmp_path / 'pictures'}" for side in ("train", "valid")]
    found = json.loads(launcher(*words, timeout=120).expect().out)
    assert [each["layout"] for each in found] == ["d2", "c2t2 ulysses", "c2t2 allgather"]
    assert all(each["too_far"] == [] and each["distances"]["worst"] < 1e-5 for each in found)
    assert all("visual.merger.mlp.0.weight" in each["distances"]["named"] for each in found)
    refused = launcher(*[word.replace("c2t2", "p2") for word in words], timeout=60)
    assert refused.status == 2 and "--layouts p2" in refused.err
    refused = launcher(*[word.replace("c2t2", "t3") for word in words], timeout=60)
    assert refused.status == 2 and "--layouts t3: training t=3 does not divide" in refused.err
    assert "Traceback" not in refused.err and "Error" not in refused.err


def spec(dtype: str) -> Spec:
    work = Work([], {}, TokenRules(None, None), Limits())
    return Spec(Path(), SimpleNamespace(dtype=dtype), work, ())


def test_in_float32_every_single_gradient_must_be_near() -> None:
    found = replace(NONE, named={"near": 9e-6, "far": 2e-5, "not a number": float("nan")})
    assert [name.split()[0] for name in judge(spec("float32"), found, None)] == ["far", "not"]
    assert judge(spec("float32"), replace(NONE, logp=2e-5), None) == ("logp 2.0e-05",)


def test_in_half_precision_a_layout_may_be_a_quarter_farther_than_one_process() -> None:
    one = replace(NONE, logp_rms=0.01, entropy_rms=0.01, gradients_rms=0.04)
    near = replace(NONE, logp_rms=0.012, entropy_rms=0.012, gradients_rms=0.049, loss=9e-4)
    assert judge(spec("bfloat16"), near, one) == ()
    assert len(judge(spec("bfloat16"), replace(near, gradients_rms=0.051, loss=2e-3), one)) == 2


def test_in_half_precision_the_norm_must_be_that_of_the_layouts_own_gradients() -> None:
    """Twice counted, say: how near the norm comes to float32's is chance, and not judged."""
    one = replace(NONE, gradients_rms=0.04, grad_norm=1e-3)
    assert judge(spec("bfloat16"), replace(one, grad_norm=3e-3, norm_gap=1e-7), one) == ()
    (far,) = judge(spec("bfloat16"), replace(one, norm_gap=3e-4), one)
    assert far.startswith("norm_gap 3.00e-04")
