"""Whatever the layout, the limits of a micro-batch and the batch: the loss and the gradient norm stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from core.engine.microbatch import Limits
from core.parallel.mesh import Degrees
from tests.engine.scene import alone, make_batch
from tests.parallel import jobs
from tests.parallel.pool import Pool

pytestmark = pytest.mark.timeout(280)
SAMPLES = 16


@st.composite
def tries(draw: st.DrawFn) -> tuple[Degrees, dict[str, Any], Limits, list[int]]:
    replicate, shard, cp, tp = (draw(st.sampled_from([1, 2])) for _ in range(4))
    if draw(st.booleans()):
        cp, tp = draw(st.sampled_from([(4, 1), (1, 4), (2, 2)]))
        replicate, shard = 1, draw(st.sampled_from([1, 2]))
    elif replicate * shard * cp * tp > 8:
        replicate = 1
    chosen = draw(st.lists(st.integers(0, SAMPLES - 1), min_size=1, max_size=SAMPLES, unique=True))
    engine = {
        "cp_style": draw(st.sampled_from(["ulysses", "allgather"])),
        "one_unit": draw(st.booleans()),
        "checkpointing": draw(st.sampled_from(["none", "full", "selective"])),
    }
    tokens = draw(st.integers(60, 400))
    limits = Limits(tokens, 4 * tokens, n_mbs=draw(st.integers(1, 3)), algorithm=draw(st.sampled_from(["ffd", "kk"])))
    return Degrees(replicate, shard, cp, tp), engine, limits, sorted(chosen)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=tries())
def test_loss_and_norm_do_not_depend_on_how_it_is_cut(
    pool: Pool, checkpoints: dict[str, Path], drawn: tuple[Degrees, dict[str, Any], Limits, list[int]]
) -> None:
    degrees, engine, limits, chosen = drawn
    path = checkpoints["tied"]
    assert len(make_batch(path).documents) == SAMPLES
    ((loss, norm),) = pool.run(jobs.steps_of_layouts, degrees, path=path, tries=[(engine, limits, chosen)])
    ((expected_loss, expected_norm),) = jobs.steps_of_layouts(alone(), path=path, tries=[({}, Limits(), chosen)])
    assert loss == pytest.approx(expected_loss, rel=1e-9, abs=1e-12)
    assert norm == pytest.approx(expected_norm, rel=1e-9)
