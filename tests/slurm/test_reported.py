"""What users of such systems reported of Slurm, ports and teardown, and the test that holds each kind of fault off.

| reported | kind of fault | test |
| --- | --- | --- |
| submitit#1741 | no heterogeneous jobs | tests/slurm/test_script.py::test_golden |
| | | tests/slurm_cluster/test_runs.py::test_a_hetjob_over_two_nodes_from_submit_to_report |
| submitit#1704 | all tasks land on GPU 0 | tests/slurm/test_preflight.py::test_a_gpu_that_two_partitions_of_a_node_were_given |
| | | tests/node/test_pieces.py::test_every_process_sees_its_own_gpus_of_those_that_are_visible |
| submitit#1656 | a job under ten minutes is timed out at once | tests/slurm_cluster/test_exact_resume.py::test_a_time_limit_under_ten_minutes_asks_for_one_requeue |
| submitit#1617, PR 1770 | requeue trips over a leftover file | tests/slurm/test_batch.py::test_a_requeue_does_not_trip_over_what_was_left |
| submitit PR 1770 | PREEMPTED and other states taken for what they are not | tests/slurm/test_states.py::test_timeout_is_no_success_and_preemption_does_not_crash |
| | | tests/slurm/test_queue.py::test_status_tells_every_state_in_words |
| fairchem PR 1055 | a requeue resumes from the same old checkpoint for ever | tests/slurm/test_batch.py::test_nothing_of_an_attempt_is_in_the_pickle |
| submitit helpers | CUDA_VISIBLE_DEVICES overwritten by the local rank | tests/slurm_cluster/test_runs.py::test_two_and_two_nodes_and_one_job_of_two_steps_beside_them |
| submitit helpers | a port computed from the job id, unchecked | tests/slurm/test_reported.py::test_no_port_follows_from_the_job_id |
| prime-rl#2574, NeMo-RL#1019 | a component dies, the job holds its nodes | tests/slurm_cluster/test_losses.py::test_a_killed_daemon_is_named_within_ten_seconds_and_ends_the_job |
| | a node is lost | tests/slurm_cluster/test_losses.py::test_a_lost_node_is_named_within_45_seconds_and_the_job_asks_for_a_requeue |
| | the node of the lead is lost | tests/slurm_cluster/test_exact_resume.py::test_the_lead_daemons_node_is_lost |
| | a node is lost and its srun returns 0 | tests/slurm_cluster/test_losses.py::test_a_lost_node_whose_srun_returned_0_is_named_and_the_run_goes_on |
| prime-rl#1713, ms-swift#6386, verl#7155 | nothing moves for hours, no error | tests/node/test_run.py::test_nothing_moves_for_watchdog_secs |
| verl#6677, trl#3979, OpenRLHF#779, NeMo-RL#261 | a port is taken between choosing and binding | tests/slurm/test_reported.py::test_a_port_is_held_from_the_moment_it_is_chosen |
| | two servers of a host collide | tests/servers/test_processes.py::test_two_holders_never_have_a_port_in_common |
| | two runs of a host collide | tests/node/test_run.py::test_two_runs_started_in_the_same_second_both_finish |
| AReaL#622, vllm#34643 | servers survive Ctrl-C, kill -9 or an OOM kill | tests/node/test_run.py::test_a_signal_to_the_launcher_ends_everything |
| | | tests/node/test_run.py::test_kill_9_of_a_daemon_leaves_nothing |
| prime-rl template | processes of others killed by their name | tests/node/test_guard.py::test_a_stranger_is_never_signalled |
| | | tests/slurm_cluster/test_runs.py::test_cancel_while_pending_and_while_running |
| vllm#11996, #16259 | /health says 200 after a worker died | tests/embedded/test_embedded_protocol.py::test_health_is_a_generated_token |
| | healthy, but stuck | tests/rollout/test_failures.py::test_a_server_that_is_silent_while_requests_wait_is_restarted |
| AReaL, lingua users | no way to name partition, account, qos … | tests/slurm/test_ask.py::test_every_named_field_of_a_job_is_there |
| | an option nobody thought of | tests/slurm/test_reported.py::test_any_other_option_of_sbatch_passes_through |
"""  # noqa: E501

from __future__ import annotations

import ast
import re
import socket
from collections.abc import Callable

import pytest

from core.config import Config
from core.rpc.errors import PortTakenError
from core.rpc.service import bound_socket
from tests.slurm.conftest import ROOT
from tests.slurm.test_script import text_of

NAMED = [line.split("|")[3].strip() for line in (__doc__ or "").splitlines() if "::" in line]


@pytest.mark.parametrize("name", NAMED)
def test_every_test_of_the_table_is_there(name: str) -> None:
    path, _, function = name.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_a_port_is_held_from_the_moment_it_is_chosen() -> None:
    """Whoever binds what was just chosen, with or without SO_REUSEADDR, is refused: there is no moment in between."""
    held = [bound_socket("127.0.0.1") for _ in range(300)]
    try:
        ports = [each.getsockname()[1] for each in held]
        assert len(set(ports)) == len(ports)
        for port in ports:
            with pytest.raises(PortTakenError):
                bound_socket("127.0.0.1", port)
            with socket.socket() as rival, pytest.raises(OSError, match="in use"):
                rival.bind(("127.0.0.1", port))
    finally:
        for each in held:
            each.close()


def test_no_port_follows_from_the_job_id(recipe: Callable[..., Config]) -> None:
    """Two runs whose jobs have ids a round number apart share a node: nothing in the script says a port."""
    for overrides in (("cluster.n_nodes=1",), ("cluster.n_nodes=2", "allocation_mode=vllm:d8+d8")):
        text = text_of(recipe(*overrides))
        assert not re.search(r"\bport\b|_port\b|MASTER_", text, re.IGNORECASE)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("slurm.options.switches=1@10:00", "--switches=1@10:00"),
        ("slurm.options.no-kill=true", "--no-kill"),
        ("slurm.options.gres-flags=enforce-binding", "--gres-flags=enforce-binding"),
        ("slurm.options.tmp=100G", "--tmp=100G"),
        ("slurm.options.clusters=a,b", "--clusters=a,b"),
        ("slurm.options.wckey='my key'", "--wckey='my key'"),
    ],
)
def test_any_other_option_of_sbatch_passes_through(recipe: Callable[..., Config], override: str, line: str) -> None:
    assert f"#SBATCH {line}\n" in text_of(recipe("cluster.n_nodes=1", override))
