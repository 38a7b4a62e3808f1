"""Every state that Slurm knows has its meaning here, by the name that its commands print."""

from __future__ import annotations

import pytest

from launcher.slurm.queue import JobView, Seen, leader
from launcher.slurm.states import MEANINGS, Fate, meaning

# `man squeue`, JOB STATE CODES, of 22.05 and 24.11
DOCUMENTED = [
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "CONFIGURING",
    "COMPLETING",
    "DEADLINE",
    "EXPEDITING",
    "FAILED",
    "LAUNCH_FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PENDING",
    "POWER_UP_NODE",
    "PREEMPTED",
    "RECONFIG_FAIL",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESIZING",
    "RESV_DEL_HOLD",
    "REVOKED",
    "RUNNING",
    "SIGNALING",
    "SPECIAL_EXIT",
    "STAGE_OUT",
    "STOPPED",
    "SUSPENDED",
    "TIMEOUT",
    "UPDATE_DB",
]
FATES = {
    Fate.WAITING: "CONFIGURING EXPEDITING PENDING POWER_UP_NODE REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD "
    "SPECIAL_EXIT",
    Fate.RUNNING: "RESIZING RUNNING SIGNALING STOPPED SUSPENDED",
    Fate.ENDING: "COMPLETING STAGE_OUT UPDATE_DB",
    Fate.DONE: "COMPLETED",
    Fate.CANCELLED: "CANCELLED REVOKED",
    Fate.FAILED: "BOOT_FAIL DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED RECONFIG_FAIL TIMEOUT",
}


def test_no_state_is_missing() -> None:
    assert sorted(MEANINGS) == sorted(DOCUMENTED)
    assert sorted(" ".join(FATES.values()).split()) == sorted(DOCUMENTED)


@pytest.mark.parametrize(("fate", "states"), FATES.items())
def test_fates(fate: Fate, states: str) -> None:
    assert {meaning(state).fate for state in states.split()} == {fate}


def test_timeout_is_no_success_and_preemption_does_not_crash() -> None:
    """AReaL fault 10: TIMEOUT is read as success, PREEMPTED and NODE_FAIL crash the monitor."""
    for state in ("TIMEOUT", "PREEMPTED", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL"):
        assert meaning(state).fate is Fate.FAILED and not meaning(state).alive and meaning(state).text


@pytest.mark.parametrize("printed", ["CANCELLED by 1000", "CANCELLED+", "cancelled"])
def test_states_as_commands_decorate_them(printed: str) -> None:
    assert meaning(printed).fate is Fate.CANCELLED


def test_an_unknown_state_is_not_taken_for_an_end() -> None:
    assert meaning("NEW_IN_25").alive


def seen(job_id: str, state: str) -> Seen:
    return Seen(job_id, state, "", "", "", "me", "", "", "1")


@pytest.mark.parametrize(
    ("states", "alive", "fate"),
    [
        (("RUNNING", "RUNNING"), True, Fate.RUNNING),
        (("RUNNING", "TIMEOUT"), True, Fate.RUNNING),
        (("COMPLETED", "FAILED"), False, Fate.FAILED),
        (("COMPLETED", "COMPLETED"), False, Fate.DONE),
        (("PENDING", "PENDING"), True, Fate.WAITING),
    ],
)
def test_a_job_is_what_is_furthest_from_a_good_end(states: tuple[str, str], alive: bool, fate: Fate) -> None:
    view = JobView("7", tuple(seen(f"7+{index}", state) for index, state in enumerate(states)))
    assert (view.alive, view.fate) == (alive, fate)


@pytest.mark.parametrize("job_id", ["12", "12+1", "12.inference", "12.0", "12_3"])
def test_every_form_of_an_id_leads_to_its_leader(job_id: str) -> None:
    assert leader(job_id) == "12"
