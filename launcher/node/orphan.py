"""On a cluster, when the lead daemon's machine is gone: who writes how the attempt ended.

The lead is the only writer of state.json while it lives. A daemon that lost it looks whether its heartbeat file still
moves; where it does not, nobody else will write. Locally the launcher does this (launcher.attached).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

from launcher.node.book import Ending
from launcher.node.specs import NodeContext
from launcher.node.state import BEAT_SECS, heartbeat_file, read_state, write_state

STATUS = 86
"""Exit status of a daemon that lost its lead: the batch script need not wait for the lead's own end."""
STILL_SECS = 3 * BEAT_SECS


async def write_for_the_lead(context: NodeContext, ending: Ending) -> None:
    if not context.on_cluster:
        return
    beats = heartbeat_file(context.run_dir)
    with contextlib.suppress(OSError):  # the run directory is gone or full: nothing can be written for anybody
        before = beats.stat().st_mtime_ns
        await asyncio.sleep(STILL_SECS)
        state = read_state(context.run_dir)
        if state is None or state.attempt != context.attempt or state.phase.final:
            return
        if beats.stat().st_mtime_ns == before:
            write_state(context.run_dir, dataclasses.replace(state, phase=ending.phase, error=ending.error))
