"""Which samples are trained together: minibatches, ranks and micro-batches.

Owns the packing as a pure function of sizes to lists of sample numbers; tensors are built by core.engine.documents.
A cost is text tokens plus patches in units of a token. Samples of a group share images, so a group stays on one rank
and in one micro-batch where it fits; every rank has the same number of micro-batches, the missing ones empty.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

SPLIT_IMBALANCE = 1.05  # ranks may differ by this factor from the mean before a group is split over them


class PackingError(ValueError):
    """Sizes or limits that cannot be packed."""


@dataclass(frozen=True)
class Item:
    """Size of one sample."""

    tokens: int
    group: str = ""
    images: tuple[tuple[str, int], ...] = ()  # (content hash, patches)


@dataclass(frozen=True)
class Limits:
    """Of a micro-batch. `patch_cost` is the tower's work per patch over the decoder's per token."""

    max_tokens: int | None = None
    max_patches: int | None = None
    n_mbs: int = 1
    n_mbs_divisor: int = 1
    algorithm: str = "ffd"
    patch_cost: float = 0.25

    @classmethod
    def from_config(cls, mb_spec: Any, *, merge: int = 2, patch_cost: float = 0.25) -> Limits:
        """Of `actor.mb_spec`; patches may be as many as would fill every token with an image."""
        limit = mb_spec.max_tokens_per_mb
        patches = None if limit is None else limit * merge * merge
        return cls(limit, patches, mb_spec.n_mbs or 1, mb_spec.n_mbs_divisor, mb_spec.packing_algorithm, patch_cost)


@dataclass(frozen=True)
class Minibatch:
    """ranks[r][j] are the sample numbers of micro-batch j on rank r; tower[j]: does any rank have an image in it."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    tower: tuple[bool, ...]

    def samples_of(self, rank: int) -> list[int]:
        """Sample numbers of a rank, micro-batch after micro-batch."""
        return [sample for micro in self.ranks[rank] for sample in micro]


@dataclass(frozen=True)
class Packing:
    """The minibatches of one step."""

    minibatches: tuple[Minibatch, ...]

    def to_json(self) -> list[Any]:
        return [[minibatch.ranks, minibatch.tower] for minibatch in self.minibatches]

    @classmethod
    def from_json(cls, value: list[Any]) -> Packing:
        def ranks(tree: Any) -> tuple[tuple[tuple[int, ...], ...], ...]:
            return tuple(tuple(tuple(int(i) for i in micro) for micro in rank) for rank in tree)

        return cls(tuple(Minibatch(ranks(tree), tuple(bool(t) for t in tower)) for tree, tower in value))


@dataclass(frozen=True)
class _Unit:
    """Samples that stay together."""

    samples: tuple[int, ...]
    tokens: int
    images: dict[str, int] = field(default_factory=dict)
    patch_cost: float = 0.0

    @property
    def cost(self) -> float:
        return self.tokens + self.patch_cost * sum(self.images.values())


def pack(items: Sequence[Item], *, ranks: int, minibatches: int = 1, limits: Limits | None = None) -> Packing:
    """Minibatches of whole groups in order, each spread over the ranks by cost and cut into micro-batches."""
    limits = limits or Limits()
    if ranks < 1 or minibatches < 1:
        raise PackingError(f"cannot pack for {ranks} ranks and {minibatches} minibatches")
    if limits.algorithm not in ("ffd", "kk"):
        raise PackingError(f"mb_spec.packing_algorithm {limits.algorithm!r} is not ffd or kk")
    groups: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        groups.setdefault(item.group or f"sample {number}", []).append(number)
    pieces = list(groups.values())
    if len(pieces) < minibatches:
        pieces = [[number] for number in range(len(items))]
    return Packing(tuple(_minibatch(items, part, ranks, limits) for part in _even(pieces, minibatches)))


def _even(pieces: list[list[int]], parts: int) -> list[list[list[int]]]:
    """The pieces in order, in parts whose numbers of pieces differ by at most one."""
    edges = [len(pieces) * k // parts for k in range(parts + 1)]
    return [pieces[a:b] for a, b in pairwise(edges)]


def _minibatch(items: Sequence[Item], pieces: list[list[int]], ranks: int, limits: Limits) -> Minibatch:
    units = [unit for piece in pieces for unit in _fitting(items, piece, limits)]
    shares = _share(items, units, ranks, limits)
    bins = [_bins(items, share, limits) for share in shares]
    count = max(limits.n_mbs, *(len(found) for found in bins))
    count = -(-count // limits.n_mbs_divisor) * limits.n_mbs_divisor
    bins = [found if len(found) >= limits.n_mbs else _spread(items, found, limits) for found in bins]
    rows = []
    for found in bins:
        # heavy ones first on every rank: those that wait for each other are of a size
        ordered = sorted(found, key=lambda unit: -unit.cost)
        rows.append(tuple(tuple(sorted(unit.samples)) for unit in ordered) + ((),) * (count - len(found)))
    tower = tuple(any(items[i].images for row in rows for i in row[j]) for j in range(count))
    return Minibatch(tuple(rows), tower)


def _unit(items: Sequence[Item], samples: Sequence[int], limits: Limits) -> _Unit:
    images = {name: patches for i in samples for name, patches in items[i].images}
    return _Unit(tuple(samples), sum(items[i].tokens for i in samples), images, limits.patch_cost)


def _fits(tokens: int, patches: int, limits: Limits) -> bool:
    return (limits.max_tokens is None or tokens <= limits.max_tokens) and (
        limits.max_patches is None or patches <= limits.max_patches
    )


def _fitting(items: Sequence[Item], samples: list[int], limits: Limits) -> list[_Unit]:
    """The samples of a group as one unit, or as several that each fit a micro-batch (one sample alone always does)."""
    units: list[list[int]] = [[]]
    for sample in samples:
        grown = _unit(items, [*units[-1], sample], limits)
        if units[-1] and not _fits(grown.tokens, sum(grown.images.values()), limits):
            units.append([])
        units[-1].append(sample)
    return [_unit(items, unit, limits) for unit in units]


def _share(items: Sequence[Item], units: list[_Unit], ranks: int, limits: Limits) -> list[list[_Unit]]:
    """Units per rank by largest differencing; a group is split only where ranks would differ too much."""
    units, best = list(units), karmarkar_karp([unit.cost for unit in units], ranks)
    mean = sum(unit.cost for unit in units) / ranks
    for _ in range(4 * ranks):
        loads = _loads(units, best)
        heaviest = max(range(ranks), key=loads.__getitem__)
        splittable = [i for i in best[heaviest] if len(units[i].samples) > 1]
        if loads[heaviest] <= SPLIT_IMBALANCE * mean or not splittable:
            break
        largest = max(splittable, key=lambda i: units[i].cost)
        samples = units[largest].samples
        half = len(samples) // 2
        finer = [unit for i, unit in enumerate(units) if i != largest]
        finer += [_unit(items, samples[:half], limits), _unit(items, samples[half:], limits)]
        found = karmarkar_karp([unit.cost for unit in finer], ranks)
        # of several heaviest ranks one gets lighter at a time
        if sorted(_loads(finer, found), reverse=True) >= sorted(loads, reverse=True):
            break
        units, best = finer, found
    return [[units[i] for i in part] for part in best]


def _loads(units: list[_Unit], parts: list[list[int]]) -> list[float]:
    return [sum(units[i].cost for i in part) for part in parts]


def _bins(items: Sequence[Item], units: list[_Unit], limits: Limits) -> list[_Unit]:
    """Micro-batches of one rank within the limits."""
    if limits.algorithm == "kk":
        for count in range(1, len(units) + 1):
            parts = karmarkar_karp([unit.cost for unit in units], count)
            merged = [_merge([units[i] for i in part]) for part in parts]
            if all(_fits(bin_.tokens, sum(bin_.images.values()), limits) for bin_ in merged):
                return merged
    return first_fit_decreasing(units, limits)


def first_fit_decreasing(units: Sequence[_Unit], limits: Limits) -> list[_Unit]:
    """Each unit, largest first, into the first bin with room, preferring one that already holds its images."""
    bins: list[_Unit] = []
    for unit in sorted(units, key=lambda unit: (-unit.tokens, unit.samples)):
        room = [
            i
            for i, found in enumerate(bins)
            if _fits(found.tokens + unit.tokens, sum({**found.images, **unit.images}.values()), limits)
        ]
        if room:
            chosen = next((i for i in room if unit.images and unit.images.keys() <= bins[i].images.keys()), room[0])
            bins[chosen] = _merge([bins[chosen], unit])
        else:
            bins.append(unit)
    return bins


def _spread(items: Sequence[Item], bins: list[_Unit], limits: Limits) -> list[_Unit]:
    """At least n_mbs micro-batches, or one per sample where there are fewer samples."""
    units = [_unit(items, [i], limits) for found in bins for i in found.samples]
    for count in range(limits.n_mbs, len(units)):
        finer = [_merge([units[i] for i in part]) for part in karmarkar_karp([unit.cost for unit in units], count)]
        if all(_fits(found.tokens, sum(found.images.values()), limits) for found in finer):
            return finer
    return units


def _merge(units: Sequence[_Unit]) -> _Unit:
    images = {name: patches for unit in units for name, patches in unit.images.items()}
    samples = tuple(sorted(i for unit in units for i in unit.samples))
    return _Unit(samples, sum(unit.tokens for unit in units), images, units[0].patch_cost)


def karmarkar_karp(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Numbers 0…n−1 in `parts` sets of nearly equal cost (largest differencing method); sets may be empty."""
    if not costs:
        return [[] for _ in range(parts)]
    Sets = list[tuple[float, list[int]]]  # heaviest first
    heap: list[tuple[float, int, Sets]] = []
    for number, cost in enumerate(costs):
        start: Sets = [(cost, [number])] + [(0.0, [])] * (parts - 1)
        heap.append((-cost if parts > 1 else 0.0, number, start))
    heapq.heapify(heap)
    tie = len(costs)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, two = heapq.heappop(heap)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(two), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], tie, joined))
        tie += 1
    return [sorted(numbers) for _, numbers in heap[0][2]]
