"""Whether a model can be cut as an allocation asks: heads, kv heads, vocabulary, intermediate, layers."""

from __future__ import annotations

from collections.abc import Iterator

from core.config import Config
from launcher.allocation import Allocation, Component, pointer
from launcher.model_sizes import ModelShape
from launcher.planning.problem import Problem


def cutting_problems(config: Config, allocation: Allocation, shape: ModelShape) -> list[Problem]:
    """Every size that does not divide, with the component's dims under a caret."""
    return [
        Problem("allocation_mode", text, pointer(allocation.text, *component.dims_span), layout=True)
        for component in allocation.components
        for text in (_server(component, shape) if component.is_inference else _trainer(config, component, shape))
    ]


def _server(component: Component, shape: ModelShape) -> Iterator[str]:
    dims = component.dims
    if component.backend == "embedded" and dims.replica > 1:
        yield f"the embedded server runs on one device: {dims} wants {dims.replica}; use d for more servers"
        return
    yield from _tensor_cuts("inference", dims.t, shape)
    if dims.p > shape.layers:
        yield f"p={dims.p} stages for the {shape.layers} layers of {shape.name}"
    for axis in ("c", "e"):
        if getattr(dims, axis) > 1:
            yield f"{axis}={getattr(dims, axis)}: inference has no such dimension; it has d, p and t"


def _trainer(config: Config, component: Component, shape: ModelShape) -> Iterator[str]:
    dims = component.dims
    if dims.p > 1:
        yield f"training p={dims.p} is known but not built yet"
    yield from _tensor_cuts("training", dims.t, shape)
    if dims.c > 1 and config.actor.archon.cp_style == "ulysses":
        heads, kv_heads = shape.heads // dims.t, max(1, shape.kv_heads // dims.t)
        if heads % dims.c:
            yield f"c={dims.c}: ulysses splits the {heads} heads of a rank; or actor.archon.cp_style=allgather"
        elif kv_heads % dims.c and dims.c % kv_heads:
            yield f"c={dims.c}: the {kv_heads} kv heads of a rank neither divide nor repeat; or cp_style=allgather"
    if dims.e > 1:
        yield f"e={dims.e}: {shape.name} has no experts"
    replicas = config.actor.archon.dp_replicate
    if dims.d % replicas:
        yield f"d={dims.d} is not a multiple of actor.archon.dp_replicate={replicas}"


def _tensor_cuts(side: str, t: int, shape: ModelShape) -> Iterator[str]:
    """Kv heads fewer than t repeat; the vision tower is never cut."""
    sizes = {"attention heads": shape.heads, "intermediate size": shape.intermediate, "vocabulary rows": shape.vocab}
    if t % shape.kv_heads:
        sizes["kv heads"] = shape.kv_heads
    uneven = [f"{size} {name}" for name, size in sizes.items() if size % t]
    if uneven:
        yield f"{side} t={t} does not divide {', '.join(uneven)} of {shape.name}"
