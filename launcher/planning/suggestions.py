"""Layouts near to the one asked for that fit: each is judged before it is named.

Owns which alternatives are tried and in what order (nearest first); whether one fits is judge's word alone.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from core.config import Config
from launcher.allocation import Allocation, AllocationError, Component, Dims, parse
from launcher.planning.batch import samples_of
from launcher.planning.change import with_value
from launcher.planning.judge import judge
from launcher.planning.known import Known
from launcher.planning.problem import Problem

Changes = dict[str, Any]

_LAYOUTS_NAMED = 2
_JUDGED_AT_MOST = 400
_D = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_T = (1, 2, 4, 8)


def fits(config: Config, known: Known, device: str, problems: list[Problem]) -> list[str]:
    """Changes after which no layout problem is left and no other is new: other allocations, then other settings."""
    if not any(problem.layout for problem in problems):
        return []
    others = {str(problem) for problem in problems if not problem.layout}

    def cures(changes: Changes) -> bool:
        left = judge(_changed(config, changes), known, device).problems
        return all(not problem.layout and str(problem) in others for problem in left)

    nearest = itertools.islice(_allocations(config, known), _JUDGED_AT_MOST)
    found = [changes["allocation_mode"] for changes in itertools.islice(filter(cures, nearest), _LAYOUTS_NAMED)]
    for alternatives in _settings(config, problems):
        first = next(filter(cures, alternatives), None)
        if first is not None:
            found.append(" ".join(f"{key}={_shown(value)}" for key, value in first.items()))
    return found


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _changed(config: Config, changes: Changes) -> Config:
    for key, value in changes.items():
        config = with_value(config, key, value)
        if key == "train_dataset.batch_size":
            config = with_value(config, "rollout.consumer_batch_size", value)
    return config


def _allocations(config: Config, known: Known) -> Iterator[dict[str, str]]:
    """Allocations with the same backends, nearest first."""
    server, trainer = _starting_point(config)
    if config.type == "sft":
        server = None
    total = config.cluster.n_nodes * config.cluster.n_gpus_per_node
    samples = samples_of(config)
    servers: list[Dims | None] = [None]
    if server is not None:
        most = max(server.dims.replica, config.cluster.n_gpus_per_node)  # none over more nodes than asked for
        several = [(t, p) for t in _T for p in sorted({1, server.dims.p}) if t * p <= most]
        servers = [Dims(d=d, t=t, p=p) for d in _D for t, p in several if d * t * p < total]
    trainers: list[Dims | None] = [None]
    if trainer is not None:
        trainers = [
            Dims(d=d, t=t, c=c)
            for d in _D
            if d <= total and samples % d == 0
            for t in {1, trainer.dims.t}
            for c in {1, trainer.dims.c}
        ]
    scored = []
    for ours, theirs in itertools.product(servers, trainers):
        world = (ours.world if ours else 0) + (theirs.world if theirs else 0)
        if world > total:
            continue
        distance = _distance(ours, server) + _distance(theirs, trainer) + (total - world) / total
        scored.append((distance, str(Allocation(_groups(server, ours, trainer, theirs)))))
    yield from ({"allocation_mode": text} for _, text in sorted(scored) if text != config.allocation_mode)


def _groups(
    server: Component | None, ours: Dims | None, trainer: Component | None, theirs: Dims | None
) -> tuple[tuple[Component, ...], ...]:
    groups = []
    if server is not None and ours is not None:
        groups.append((Component(server.backend, ours),))
    if trainer is not None and theirs is not None:
        groups.append((Component(trainer.backend, theirs),))
    return tuple(groups)


def _distance(dims: Dims | None, wanted: Component | None) -> float:
    if dims is None or wanted is None:
        return 0.0
    return sum(abs(math.log2(getattr(dims, axis) / getattr(wanted.dims, axis))) for axis in "dptc")


def _starting_point(config: Config) -> tuple[Component | None, Component | None]:
    """What was asked for, as far as it can be read: a zero is taken as one, an unreadable side as a default."""
    text = re.sub(r"([dptce])0+(?![0-9])", r"\g<1>1", config.allocation_mode)
    try:
        components = parse(text).components
    except AllocationError:
        backend = "vllm" if "vllm" in text else "embedded" if "embedded" in text else "sglang"
        return Component(backend, Dims(d=4)), Component("archon", Dims(d=4))
    server = next((each for each in components if each.is_inference), None)
    trainer = next((each for each in components if not each.is_inference), None)
    if config.type == "rl" and server is None:
        server = Component("sglang", Dims())
    if config.type == "sft" and trainer is None:
        trainer = Component("archon", Dims())
    return server, trainer


def _settings(config: Config, problems: list[Problem]) -> Iterator[list[Changes]]:
    """For each kind of problem, settings that may cure it; the smallest change first."""
    keys = {problem.key for problem in problems if problem.layout}
    nodes = config.cluster.n_nodes
    if "allocation_mode" in keys:
        yield [{"cluster.n_nodes": more} for more in range(nodes + 1, 2 * nodes + 8)]
    if "train_dataset.batch_size" in keys:
        batch = config.train_dataset.batch_size
        near = sorted(range(max(1, batch // 2), 2 * batch + 1), key=lambda value: abs(value - batch))
        yield [{"train_dataset.batch_size": value} for value in near]
    if "cluster.gpu_memory_gib" in keys:
        yield list(_savings(config))


def _savings(config: Config) -> Iterator[Changes]:
    """Less activation memory, then more nodes to shard over as well."""
    less: Changes = {}
    if not config.actor.gradient_checkpointing:
        less["actor.gradient_checkpointing"] = True
    if config.actor.archon.ac_mode != "full":
        less["actor.archon.ac_mode"] = "full"
    limit = config.actor.mb_spec.max_tokens_per_mb
    shorter: list[Changes] = [{}]
    shorter += [{"actor.mb_spec.max_tokens_per_mb": limit // part} for part in (2, 4)] if limit else []
    if less:
        yield dict(list(less.items())[:1])
    yield from ({**less, **each} for each in shorter if less or each)
    server, trainer = _starting_point(config)
    if trainer is None:
        return
    for factor in (2, 4, 8):
        wider = replace(trainer.dims, d=trainer.dims.d * factor)
        text = str(Allocation(_groups(server, server.dims if server else None, trainer, wider)))
        larger: Changes = {"cluster.n_nodes": config.cluster.n_nodes * factor, "allocation_mode": text}
        yield from ({**larger, **less, **each} for each in shorter)
