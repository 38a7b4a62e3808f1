"""Begin and end of an attempt: which one it is, what a job's end means, and when it goes back to the queue."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from submitit.core import utils

from core.config import load
from launcher.node.state import Phase, RunError, State, read_state, write_state
from launcher.run_dir import RunDir
from launcher.slurm.batch import finish, start
from launcher.slurm.plugin import ComponentsJobEnvironment
from launcher.slurm.script import AGAIN_STATUS
from launcher.slurm.task import NodeTask, find_place
from tests.support.runs import ROOT

Make = Callable[..., RunDir]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def run_dir(*overrides: str, **state: object) -> RunDir:
        made = RunDir(tmp_path)
        made.create()
        words = [f"cluster.fileroot={tmp_path}", "recover.mode=auto", "recover.retries=2", *overrides]
        made.config.write_text(load(ROOT / "configs" / "smoke.yaml", words, on_warning=lambda line: None).dump_yaml())
        write_state(made, dataclasses.replace(State(Phase.STARTING, 1), **state))  # type: ignore[arg-type]
        return made

    return run_dir


def test_each_start_of_a_job_is_one_attempt(make: Make) -> None:
    run_dir = make()
    assert [start(run_dir), start(run_dir), start(run_dir)] == [1, 2, 3]
    state = read_state(run_dir)
    assert state is not None and (state.attempt, state.generation, state.job_id) == (3, 2, "7")


def test_a_resumed_attempt_is_taken_as_it_is(make: Make) -> None:
    run_dir = make()
    assert start(run_dir) == 1
    write_state(run_dir, State(Phase.STARTING, 2, generation=5))
    assert start(run_dir) == 2
    state = read_state(run_dir)
    assert state is not None and state.generation == 5


@pytest.mark.parametrize("phase", [Phase.DONE, Phase.CANCELLED])
def test_nothing_is_left_to_do_for_the_rest_of_a_chain(make: Make, phase: Phase) -> None:
    assert start(make(phase=phase)) is None


def test_a_chain_ends_at_an_error_but_not_at_a_lost_node(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = make()
    start(run_dir)
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    write_state(run_dir, State(Phase.FAILED, 1, error=RunError("rank-0", "ValueError: x")))
    assert start(run_dir) is None
    write_state(run_dir, State(Phase.FAILED, 1, error=RunError("daemon of training-1", "no heartbeat for 31 s")))
    assert start(run_dir) == 2


def test_zero_without_a_record_of_done_is_a_failure(make: Make) -> None:
    run_dir = make(phase=Phase.RUNNING)
    assert finish(run_dir, 1, {"inference": 0, "training": 0}) == 1
    state = read_state(run_dir)
    assert state is not None and state.phase is Phase.FAILED and state.error is not None
    assert "the step of training ended with 0, but" in state.error.message


def test_done_is_done(make: Make) -> None:
    assert finish(make(phase=Phase.DONE), 1, {"inference": 0, "training": 0}) == 0
    assert finish(make(phase=Phase.DONE), 1, {"inference": 137, "training": 0}) == 0


@pytest.mark.parametrize(
    ("statuses", "named"),
    [({"inference": 137, "training": 1}, "inference ended with status 137"), ({}, "no step reported its end")],
)
def test_a_lead_that_could_not_write_is_written_for(make: Make, statuses: dict[str, int], named: str) -> None:
    run_dir = make(phase=Phase.RUNNING)
    for name in statuses:
        run_dir.log(1, name, 0, "daemon").touch()
    assert finish(run_dir, 1, statuses) == 1
    state = read_state(run_dir)
    assert state is not None and state.error is not None and named in state.error.message


def test_a_step_that_slurm_could_not_start_is_tried_again(make: Make) -> None:
    """`srun: error: Unable to create step` (seen after a lost node on 22.05): no error of the run's."""
    run_dir = make(phase=Phase.STARTING)
    run_dir.log(1, "inference", 0, "daemon").touch()
    assert finish(run_dir, 1, {"training": 1}) == AGAIN_STATUS
    state = read_state(run_dir)
    assert state is not None and state.error is not None and state.error.process == "daemon of training-0"
    assert "never started: its srun ended with status 1" in state.error.message


def test_a_failed_preflight_is_the_reason(make: Make) -> None:
    run_dir = make()
    start(run_dir)
    folder = run_dir.logs / "1" / "preflight"
    folder.mkdir()
    (folder / "verdict").write_text("training-1 (node7): GPU GPU-aa is not free\n")
    assert finish(run_dir, 1, {"inference": 1, "training": 1}) == 1
    state = read_state(run_dir)
    assert state is not None and state.error is not None and "node7" in state.error.message


LOST = RunError("daemon of inference-0", "is gone")


@pytest.mark.parametrize(
    ("overrides", "state", "status"),
    [
        ([], {"phase": Phase.PREEMPTED}, AGAIN_STATUS),
        (["slurm.requeue=false"], {"phase": Phase.PREEMPTED}, 1),
        ([], {"phase": Phase.FAILED, "error": LOST}, AGAIN_STATUS),
        ([], {"phase": Phase.FAILED, "error": LOST, "attempt": 3}, 1),
        (["recover.mode=disabled"], {"phase": Phase.FAILED, "error": LOST}, 1),
        ([], {"phase": Phase.FAILED, "error": RunError("rank-0", "ValueError")}, 1),
        ([], {"phase": Phase.CANCELLED}, 1),
    ],
)
def test_when_a_job_goes_back_to_the_queue(
    make: Make, overrides: list[str], state: dict[str, object], status: int
) -> None:
    run_dir = make(*overrides, **state)
    attempt = int(str(state.get("attempt", 1)))
    assert finish(run_dir, attempt, {"inference": 85, "training": 85}) == status


def test_a_step_told_to_stop_before_its_lead_could_write(make: Make) -> None:
    assert finish(make(phase=Phase.RUNNING), 1, {"inference": 85, "training": 85}) == AGAIN_STATUS


def test_a_step_that_ended_with_0_while_the_others_were_warned_lost_its_node(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm does when it notices a dead node: srun 0 there, TERM elsewhere, the whole job back to the queue."""
    monkeypatch.setenv("VLM_RL_TRAINING_NODES", "node7")
    run_dir = make()
    start(run_dir)
    assert finish(run_dir, 1, {"inference": 85, "training": 0}) == AGAIN_STATUS
    state = read_state(run_dir)
    assert state is not None and state.phase is Phase.PREEMPTED and state.error is not None
    assert state.error.process == "step of training" and "lost a node of node7" in state.error.message


def test_nothing_of_an_attempt_is_in_the_pickle() -> None:
    """fairchem PR 1055: a requeue replays the original pickle and resumes from the same old checkpoint for ever."""
    again = pickle.loads(pickle.dumps(NodeTask("/shared/run", "training")))
    assert vars(again) == {"run": "/shared/run", "partition": "training"}


def test_a_requeue_does_not_trip_over_what_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """submitit#1617, PR 1770: requeue collides with a leftover temporary file."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    monkeypatch.setenv("VLM_RL_HET_GROUP", "1")
    monkeypatch.setenv("VLM_RL_COMPONENT", "training")
    monkeypatch.setenv("SUBMITIT_FOLDER", str(tmp_path))
    environment = ComponentsJobEnvironment()
    paths = environment.paths
    assert paths.result_pickle.name == "7+1_0_result.pkl"
    left = Path(f"{paths.result_pickle}.save_tmp")
    left.write_bytes(b"half")
    environment._handle_signals(paths, utils.DelayedSubmission(int))
    with utils.temporary_save_path(paths.result_pickle) as path:
        path.write_bytes(b"whole")
    assert paths.result_pickle.read_bytes() == b"whole"


def test_a_task_knows_its_component_and_node() -> None:
    """submitit's own environment takes every component for the leader: SLURM_JOB_ID is the leader's in each."""
    environment = {
        "VLM_RL_ATTEMPT": "3", "SLURM_PROCID": "0", "SLURMD_NODENAME": "n9", "SLURM_SUBMIT_HOST": "login",
        "VLM_RL_INFERENCE_NODES": "n7", "VLM_RL_TRAINING_NODES": "n8,n9",
    }  # fmt: skip
    place = find_place("training", environment)
    assert (place.name, place.attempt, place.nodes["inference"]) == ("training-1", 3, ["n7"])
