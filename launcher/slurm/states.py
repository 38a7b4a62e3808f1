"""What each of Slurm's job states means for a run. A table; launcher.slurm.queue asks for the states."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Fate(StrEnum):
    WAITING = "waiting"  # in the queue, for the first time or again
    RUNNING = "running"
    ENDING = "ending"  # still holds nodes, on its way out
    DONE = "done"  # the script ended with 0
    FAILED = "failed"  # ended by an error of the run or of the site; resume goes on
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class Meaning:
    fate: Fate
    text: str

    @property
    def alive(self) -> bool:
        return self.fate in (Fate.WAITING, Fate.RUNNING, Fate.ENDING)


MEANINGS = {
    "PENDING": Meaning(Fate.WAITING, "waits in the queue"),
    "CONFIGURING": Meaning(Fate.WAITING, "has its nodes, they are being made ready"),
    "POWER_UP_NODE": Meaning(Fate.WAITING, "has its nodes, they are being started"),
    "REQUEUED": Meaning(Fate.WAITING, "goes back to the queue"),
    "REQUEUE_FED": Meaning(Fate.WAITING, "goes back to the queue of a federation"),
    "EXPEDITING": Meaning(Fate.WAITING, "goes back to the queue, before others"),
    "REQUEUE_HOLD": Meaning(Fate.WAITING, "is held in the queue: `scontrol release JOB` lets it go on"),
    "RESV_DEL_HOLD": Meaning(Fate.WAITING, "is held, its reservation was deleted: give it another and release it"),
    "SPECIAL_EXIT": Meaning(Fate.WAITING, "is held in a special exit state: `scontrol release JOB` lets it go on"),
    "RUNNING": Meaning(Fate.RUNNING, "runs"),
    "RESIZING": Meaning(Fate.RUNNING, "runs, its size is being changed"),
    "SIGNALING": Meaning(Fate.RUNNING, "runs, a signal is being delivered"),
    "STAGE_OUT": Meaning(Fate.ENDING, "has ended, its files are being staged out"),
    "UPDATE_DB": Meaning(Fate.ENDING, "has ended, its record is being written"),
    "SUSPENDED": Meaning(Fate.RUNNING, "is suspended: nothing moves until the site resumes it"),
    "STOPPED": Meaning(Fate.RUNNING, "was stopped by a signal and keeps its cores"),
    "COMPLETING": Meaning(Fate.ENDING, "is ending, processes may be left on its nodes"),
    "COMPLETED": Meaning(Fate.DONE, "ended with status 0"),
    "CANCELLED": Meaning(Fate.CANCELLED, "was cancelled"),
    "REVOKED": Meaning(Fate.CANCELLED, "was revoked: another cluster of the federation runs it"),
    "PREEMPTED": Meaning(Fate.FAILED, "was preempted and not requeued by the site"),
    "TIMEOUT": Meaning(Fate.FAILED, "reached its time limit"),
    "DEADLINE": Meaning(Fate.FAILED, "could not end before its deadline"),
    "NODE_FAIL": Meaning(Fate.FAILED, "lost a node and was not requeued by the site"),
    "BOOT_FAIL": Meaning(Fate.FAILED, "got nodes that did not boot"),
    "OUT_OF_MEMORY": Meaning(Fate.FAILED, "used more memory than it had asked for: raise slurm.mem_per_gpu or _node"),
    "LAUNCH_FAILED": Meaning(Fate.FAILED, "could not be launched on its nodes"),
    "RECONFIG_FAIL": Meaning(Fate.FAILED, "got nodes that could not be reconfigured"),
    "FAILED": Meaning(Fate.FAILED, "ended with an error"),
}


def meaning(state: str) -> Meaning:
    """Of a state as squeue or sacct print it ("CANCELLED by 1000", "PENDING+"); unknown ones count as running."""
    word = state.split(" ")[0].rstrip("+").upper()
    return MEANINGS.get(word, Meaning(Fate.RUNNING, f"is in a state unknown here ({state})"))
