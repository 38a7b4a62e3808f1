"""The job of a run as values: components with their sizes, and what the script of it must know.

One component per partition, one task (node daemon) per node. Values to values; launcher.slurm.script turns a Job into
text.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.config import Config
from core.config.slurm import Ask
from launcher.planning.layout import Partition, Plan
from launcher.run_dir import RunDir
from launcher.slurm.ask import asked, gibibytes
from launcher.slurm.shape import hosts_of


@dataclass(frozen=True)
class Size:
    """What one node of a component is asked for; None: the site's default."""

    nodes: int
    gpus: int
    cpus: int | None
    mem: str | None


@dataclass(frozen=True)
class Component:
    name: str
    size: Size
    ask: Ask
    hosts: tuple[int, ...] = ()
    """In one job: which of its nodes this step runs on."""


@dataclass(frozen=True)
class Job:
    name: str
    kind: str  # hetjob | one_job
    run: str
    python: str
    code: str
    components: tuple[Component, ...]
    main: str
    """The partition of the lead daemon: the job ends when it has ended."""
    requeue: bool
    signal_lead_secs: int
    chain: int = 1
    whole: Size | None = None
    """In one job: the size of the job that the steps share."""


def job_of(config: Config, plan: Plan, run_dir: RunDir, *, python: str, code: str) -> Job:
    """`python` and `code` (the directory with our packages) are as seen on the nodes."""
    components = tuple(_component(config, each) for each in plan.partitions)
    return Job(
        name=plan.run_id,
        kind=plan.shape,
        run=str(run_dir.root),
        python=config.slurm.python or python,
        code=str(run_dir.code) if config.slurm.snapshot_code else code,
        components=components,
        main="training" if plan.partition("training") else "inference",
        requeue=config.slurm.requeue,
        signal_lead_secs=config.slurm.signal_lead_secs,
        chain=config.slurm.chain,
        whole=_whole(components, hosts_of(plan)) if plan.shape == "one_job" else None,
    )


def _component(config: Config, partition: Partition) -> Component:
    ask = asked(config, partition.name)
    gpus = len(partition.nodes[0].gpus)
    processes = max(1, gpus, len(partition.nodes[0].servers), len(partition.nodes[0].ranks))
    cpus = ask.cpus_per_node or (ask.cpus_per_gpu * processes if ask.cpus_per_gpu else None)
    mem = ask.mem_per_node or (_times(ask.mem_per_gpu, processes) if ask.mem_per_gpu else None)
    size = Size(len(partition.nodes), gpus, cpus, mem)
    return Component(partition.name, size, ask, tuple(node.host for node in partition.nodes))


def _whole(components: tuple[Component, ...], hosts: int) -> Size:
    """Enough for the node on which most is wanted."""
    on = [[each.size for each in components if host in each.hosts] for host in range(hosts)]
    cpus = [sum(size.cpus or 0 for size in sizes) for sizes in on]
    sizes_known = all(each.size.mem is not None for each in components)
    everything = any(each.size.mem == "0" for each in components)
    total = max(sum(_mebibytes(size.mem or "0") for size in sizes) for sizes in on)
    mem = "0" if everything else _text(total) if sizes_known else None
    return Size(hosts, max(sum(size.gpus for size in sizes) for sizes in on), max(cpus) or None, mem)


def _times(size: str, count: int) -> str:
    return _text(_mebibytes(size) * count)


def _mebibytes(size: str) -> int:
    return round(gibibytes(size) * 1024)


def _text(mebibytes: int) -> str:
    return f"{mebibytes // 1024}G" if mebibytes % 1024 == 0 and mebibytes else f"{mebibytes}M"
