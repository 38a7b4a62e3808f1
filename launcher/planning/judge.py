"""One configuration and what is known of its model and data → the parts of a plan and everything wrong with them.

A pure function of values: launcher.plan feeds it from disk, launcher.planning.suggestions asks it about alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from core.config import Config
from launcher.allocation import Allocation, AllocationError, Component, parse, pointer
from launcher.planning.batch import batch_plan, batch_problems, lengths_of, row_problems
from launcher.planning.container import container_notes, container_problems
from launcher.planning.divisibility import cutting_problems
from launcher.planning.known import Known
from launcher.planning.layout import BatchPlan, Memory, Partition
from launcher.planning.limits import limit_problems
from launcher.planning.memory import inference_memory, memory_problems, training_memory
from launcher.planning.placement import place
from launcher.planning.problem import Problem
from launcher.slurm.ask import slurm_problems
from launcher.slurm.shape import Shape, placed

NO_BATCH = BatchPlan(0, 0, 0, 0, 0, 0, 0, None)


@dataclass
class Judgement:
    allocation: Allocation | None = None
    partitions: list[Partition] = field(default_factory=list)
    batch: BatchPlan = NO_BATCH
    memory: list[Memory] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    shape: Shape = field(default_factory=lambda: Shape("", ""))


def judge(config: Config, known: Known, device: str) -> Judgement:
    """Everything that does not depend on another thing being right is judged, so that all of it is said at once."""
    result = Judgement()
    try:
        result.allocation = allocation = parse(config.allocation_mode)
    except AllocationError as error:
        carets = pointer(error.text, error.start, error.end)
        result.problems.append(Problem("allocation_mode", error.message, carets, layout=True))
        result.problems += limit_problems(config, None, known)
        return result
    sides = _side_problems(config, allocation)
    result.problems += sides
    result.problems += cutting_problems(config, allocation, known.shape)
    _place(result, config, allocation, device)
    trainer = next((each for each in allocation.components if not each.is_inference), None)
    if trainer is not None:
        result.problems += batch_problems(config, trainer.dims.d)
        result.problems += row_problems(config, known)
        result.batch = batch_plan(config, known, trainer.dims.d)
    if not sides:
        _judge_memory(result, config, known, allocation.components, device)
    result.notes += container_notes(config, allocation)
    result.problems += container_problems(config, allocation)
    result.problems += limit_problems(config, allocation, known)
    return result


def _place(result: Judgement, config: Config, allocation: Allocation, device: str) -> None:
    """On a cluster even an emulated run lies where the real one would: so its script and its nodes are tried."""
    on_slurm = config.scheduler.type == "slurm"
    n_nodes, n_gpus = config.cluster.n_nodes, config.cluster.n_gpus_per_node
    apart = on_slurm and config.slurm.shape == "hetjob"
    result.partitions, misplaced = place(
        allocation, n_nodes * len(allocation.components) if apart else n_nodes, n_gpus, "cuda" if on_slurm else device
    )
    result.problems += misplaced
    if on_slurm and result.partitions:
        result.partitions, result.shape = placed(config, result.partitions)
        names = [each.name for each in result.partitions]
        hosts = 1 + max(node.host for each in result.partitions for node in each.nodes)
        result.problems += slurm_problems(config, result.shape.kind, names, hosts)


def _judge_memory(
    result: Judgement, config: Config, known: Known, components: tuple[Component, ...], device: str
) -> None:
    limit = config.cluster.gpu_memory_gib if device == "cuda" else 0.0
    lengths = lengths_of(config, known)
    for component in components:
        if component.is_inference:
            memory, note = inference_memory(config, component, known.shape, lengths, limit)
            result.notes.append(note)
        else:
            memory = training_memory(config, component, known.shape, result.batch, lengths, limit)
        result.memory.append(memory)
    result.problems += memory_problems(result.memory)


def _side_problems(config: Config, allocation: Allocation) -> list[Problem]:
    """One inference and one training partition (type: sft one training partition), on GPUs of their own."""
    problems = []

    def add(message: str, start: int, end: int) -> None:
        problems.append(Problem("allocation_mode", message, pointer(allocation.text, start, end), layout=True))

    for group in allocation.groups:
        if len(group) > 1:
            add(
                "colocation (a|b) is known but not built: give each partition GPUs of its own (a+b)",
                group[0].span[0],
                group[-1].span[1],
            )
    servers = [each for each in allocation.components if each.is_inference]
    trainers = [each for each in allocation.components if not each.is_inference]
    for extra in servers[1:]:
        add("a second inference partition is known but not built; use a larger d", *extra.span)
    for extra in trainers[1:]:
        add("a second training partition is known but not built", *extra.span)
    if config.type == "sft" and servers:
        add("type: sft trains only; leave the inference partition out", *servers[0].span)
    if config.type == "sft" and not trainers:
        add("type: sft needs a training partition, as in d2", *servers[0].span)
    if config.type == "rl" and not servers:
        add("type: rl needs an inference partition too, as in sglang:d1+d1", *trainers[0].span)
    return problems
