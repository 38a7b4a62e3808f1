"""allocation + cluster + model → what a run consists of, or why it cannot run.

Owns the order in which a configuration is judged. The types are in launcher.planning.layout, the judging in its
siblings, the grammar of allocation_mode in launcher.allocation. It starts nothing and imports no torch.
"""

from __future__ import annotations

from launcher.planning.layout import BatchPlan, Memory, Node, Partition, Plan, Rank, Server

__all__ = ["BatchPlan", "Memory", "Node", "Partition", "Plan", "Rank", "Server"]
