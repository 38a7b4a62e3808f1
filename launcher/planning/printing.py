"""A plan, and what is wrong with one, as plain text for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from launcher.planning.layout import Node, Partition, Plan
from launcher.planning.problem import PlanError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def plan_text(plan: Plan) -> str:
    return "\n".join(_lines(plan))


def problems_text(error: PlanError, where: Callable[[str], str]) -> str:
    """Every problem with the file:line (or override) at which its key was written."""
    lines = [f"{where(problem.place or problem.key)}: {problem}" for problem in error.problems]
    if error.fits:
        lines.append("  fits: " + ", or ".join(error.fits))
    return "\n".join(lines)


def _lines(plan: Plan) -> Iterator[str]:
    yield f"run         {plan.run_id} on {'this machine (cpu)' if plan.device == 'cpu' else 'GPUs'}"
    source = "carried sizes" if plan.model["source"] == "carried" else plan.model["source"]
    yield f"model       {plan.model['name']}: {plan.model['params'] / 1e9:.3f} B parameters ({source})"
    for line in plan.swaps:
        yield f"  swap      {line}"
    if plan.shape:
        yield f"slurm       {plan.shape}: {plan.shape_why}"
    for partition in plan.partitions:
        yield from _partition_lines(partition)
    if plan.batch.groups:
        yield from _batch_lines(plan)
    for memory in plan.memory:
        scale, unit = (1, "GiB") if memory.total >= 1 else (1024, "MiB")
        of = f" of {memory.limit * scale:.1f} {unit} per GPU" if memory.limit else f" {unit} per process"
        yield f"memory      {memory.partition}: {memory.total * scale:.2f}{of}"
        for name, size in memory.parts.items():
            yield f"              {name:<18}{size * scale:9.2f}"
    yield f"disk        {_size(plan.disk_bytes)} in the run directory"
    for line in plan.notes:
        yield f"note        {line}"
    for line in plan.warnings:
        yield f"warning     {line}"
    for line in plan.not_built:
        yield f"not built   {line}"


def _partition_lines(partition: Partition) -> Iterator[str]:
    dims = " ".join(
        f"{axis}={getattr(partition, axis)}" for axis in "dptce" if axis == "d" or getattr(partition, axis) > 1
    )
    yield f"{partition.name:<12}{partition.backend} {dims}, {_count(len(partition.nodes), 'node')}"
    for node in partition.nodes:
        yield f"  node {node.index:<5}{_place(node)}"


def _place(node: Node) -> str:
    where = f"host {node.host}, " + (f"GPUs {_ids(node.gpus)}" if node.gpus else "no GPU")
    if node.servers and node.servers[0].parts > 1:
        server = node.servers[0]
        return f"{where}: part {server.part} of {server.parts} of {server.name}"
    if node.servers:
        shown = ", ".join(each.name + (f" [{_ids(each.gpus)}]" if each.gpus else "") for each in node.servers)
        return f"{where}: {_count(len(node.servers), 'server')}: {shown}"
    ranks = [rank.rank for rank in node.ranks]
    extra = "; data and rollout services" if node.index == 0 else ""
    return f"{where}: {_count(len(ranks), 'rank')}: {_ids(ranks)}{extra}"


def _batch_lines(plan: Plan) -> Iterator[str]:
    batch = plan.batch
    steps = f"{batch.steps} steps of " if batch.steps else "a step has "
    yield f"batch       {steps}{_count(batch.groups, 'group')} = {_count(batch.samples, 'sample')}" + (
        f" in {batch.minibatches} minibatches" if batch.minibatches > 1 else ""
    )
    yield (
        f"  per rank  {_count(batch.samples_per_rank, 'sample')} in at most "
        f"{_count(batch.micro_batches_per_rank, 'micro-batch')} of {batch.tokens_per_micro_batch} tokens"
    )


def _ids(numbers: list[int]) -> str:
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))


def _count(number: int, what: str) -> str:
    plural = what if number == 1 else what + ("es" if what.endswith("ch") else "s")
    return f"{number} {plural}"


def _size(size: float) -> str:
    for unit in _UNITS:
        if size < 1024 or unit == _UNITS[-1]:
            return f"{size:.1f} {unit}"
        size /= 1024
    return ""
