"""Who waits on whom: from what the processes of a run say of themselves to a chain that ends where nothing moves.

Owns the reading (values to values); `why` asks the daemon and prints. The watchdog's report begins with the same chain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

Status = Mapping[str, Any]


def chain(services: Status, children: Status) -> list[str]:
    """One line for each process in the chain, the one that waits first."""
    trainer, rollout = services.get("trainer"), services.get("rollout")
    lines = [_trainer(trainer)]
    phase = str(trainer.get("phase", "")) if isinstance(trainer, Mapping) else ""
    if not isinstance(trainer, Mapping) or not phase.startswith(("waiting for batch", "evaluating")):
        return lines + _ranks(children)
    if not isinstance(rollout, Mapping):
        return [*lines, f"← rollout: {rollout or 'has not registered'}"]
    lines.append(_rollout(rollout))
    if rollout.get("fatal"):
        return [*lines, f"← it has stopped: {rollout['fatal'].get('message')}"]
    if rollout.get("published") is None:
        return [*lines, "← nothing is published yet: the trainer's first version is what it waits for"]
    if rollout.get("running") or rollout.get("evaluating") or not _serves_the_newest(rollout):
        return [*lines, *_servers(rollout.get("servers") or {}, children)]
    data = services.get("data")
    if not isinstance(data, Mapping):
        return [*lines, f"← data: {data or 'has not registered'}"]
    return [*lines, f"← data: {_doing(children.get('data'))}, or the trainer's next version, if the bound is reached"]


def _trainer(trainer: Any) -> str:
    if not isinstance(trainer, Mapping):
        return f"trainer: {trainer or 'has not registered'}"
    step, total = trainer.get("step"), trainer.get("total_steps")
    return f"trainer: step {step} of {total}, {trainer.get('phase')}{_for(trainer.get('phase_secs'))}"


def _rollout(rollout: Status) -> str:
    counts = ", ".join(f"{rollout.get(name)} {name}" for name in ("consumed", "ready", "running"))
    return f"← rollout: batch {rollout.get('batches')} logged, groups {counts}, version {rollout.get('served')} served"


def _serves_the_newest(rollout: Status) -> bool:
    served = rollout.get("served")
    return served is not None and str(rollout["published"]).startswith(f"v{served:06d}-")


def _servers(servers: Status, children: Status) -> list[str]:
    if not servers:
        up = [name for name in children if name.startswith("server-")]
        return [f"← servers: none has registered ({', '.join(up) or 'they are on another node'})"]
    states = Counter(str(row.get("state")) for row in servers.values())
    lines = [f"← {count} of {len(servers)} servers {state}" for state, count in states.most_common()]
    for name, row in servers.items():
        reason = f": {row['reason']}" if row.get("reason") else ""
        running = f"{row.get('running')} requests, silent{_for(row.get('silent_secs'))}"
        lines.append(f"    {name}: {row.get('state')}{_for(row.get('state_secs'))}, {running}{reason}")
    return lines


def _ranks(children: Status) -> list[str]:
    ranks = {name: row for name, row in children.items() if name.startswith("rank-") and "doing" in row}
    if not ranks:
        return ["← ranks: none has said anything on this node"]
    slowest = max(ranks, key=lambda name: ranks[name].get("silent_secs", 0.0))
    lines = [f"← {slowest}, the longest without a sign{_for(ranks[slowest].get('silent_secs'))}"]
    return lines + [f"    {name}: {_doing(row)}" for name, row in sorted(ranks.items())]


def last_signs(children: Status) -> list[str]:
    """The last progress of every process of a node."""
    return [f"{name:<12} {row.get('state', ''):<9} {_doing(row)}" for name, row in children.items()]


def _doing(row: Any) -> str:
    if not isinstance(row, Mapping) or "doing" not in row:
        return "says nothing of what it does"
    return f"{row['doing']}{_for(row.get('since_secs'))}, last sign {row.get('silent_secs', 0.0):.0f} s ago"


def _for(secs: Any) -> str:
    return f" for {secs:.0f} s" if isinstance(secs, int | float) else ""
