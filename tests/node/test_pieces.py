"""The pure parts of a node: states, restarts, log tails, the table of children, the book, the watchdog."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.node import book as entries
from launcher.node import local_dir, state
from launcher.node.book import Book, Ending, RanksReport, ServerEntry
from launcher.node.children import MOVES, ChildState, Exit
from launcher.node.local_dir import local_root
from launcher.node.log_tail import last_error
from launcher.node.restarts import Restarts
from launcher.node.specs import NodeContext, lead_node, rank_specs, server_specs, service_specs
from launcher.node.state import Phase, RunError, State, read_state, write_state
from launcher.node.watchdog import Watchdog, progress
from launcher.plan import Node, Partition, Plan, Rank, Server
from launcher.run_dir import RunDir
from tests.node.conftest import BATCH, made_plan


def test_a_child_that_flaps_is_given_up_and_one_that_lived_is_not() -> None:
    restarts = Restarts(limit=3, settled_secs=60)
    assert [restarts.pause_after(1), restarts.pause_after(1), restarts.pause_after(1)] == [0.25, 1.0, None]
    lived = Restarts(limit=3, settled_secs=60)
    assert all(lived.pause_after(61) == 0.25 for _ in range(20))


@given(st.lists(st.floats(0, 200), min_size=1, max_size=30))
def test_pauses_are_bounded_and_three_quick_deaths_in_a_row_end_it(lives: list[float]) -> None:
    restarts = Restarts()
    pauses = [restarts.pause_after(life) for life in lives]
    assert all(pause is None or 0 < pause <= 30 for pause in pauses)
    for first in range(len(lives) - 2):
        if lives[first + 1] < 60 and lives[first + 2] < 60:
            assert pauses[first + 2] is None


def test_terminal_states_have_no_way_out() -> None:
    assert not MOVES[ChildState.ENDED] and not MOVES[ChildState.OUT]
    assert set(MOVES) == set(ChildState)


def test_an_exit_says_what_happened() -> None:
    assert Exit(1, False, 0.1, 0).reason == "exit status 1"
    assert Exit(137, False, 0.1, 0).reason == "ended by SIGKILL"
    assert Exit(-9, False, 0.1, 0).reason == "its guard was ended by SIGKILL"


LOG = """\
loading
Traceback (most recent call last):
  File "a.py", line 1, in <module>
ValueError: first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "a.py", line 3, in <module>
    raise WeightsError(
core.weights.WeightsError: shard 2 is short
  by 12 bytes
12:00:00 guard of python (7): the parent is gone, TERM to the command
"""


def test_the_last_error_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("Traceback (most recent call last):\nKeyError: of the start before\n" + LOG)
    found = last_error(path)
    assert found.message == "core.weights.WeightsError: shard 2 is short"
    assert found.traceback.startswith("Traceback") and found.traceback.endswith("by 12 bytes")
    path.write_text("one\nSegmentation fault\n\n")
    assert last_error(path).message == "Segmentation fault"
    path.write_text("")
    assert last_error(path).message == ""
    assert last_error(tmp_path / "missing.log").message == ""


def test_an_error_before_this_start_is_not_this_starts(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text(LOG)
    offset = path.stat().st_size
    with path.open("a") as file:
        file.write("killed\n")
    assert last_error(path, offset=offset).message == "killed"


def test_which_errors_may_be_consequences() -> None:
    from launcher.node.log_tail import LastError

    assert LastError("RuntimeError: [gloo] Connection closed by peer", "").may_follow_another
    assert LastError("DistStoreError: Timed out after 31 seconds", "").may_follow_another
    assert not LastError("ValueError: row 7 has no answer", "").may_follow_another


def context(tmp_path: Path, plan: Plan, name: str = "training", **fields: object) -> NodeContext:
    run_dir = RunDir(tmp_path / "run")
    given = {"local": Path("/dev/shm/x"), "daemon": "http://127.0.0.1:1", "store": "127.0.0.1:2"} | fields
    return NodeContext(run_dir, plan, 1, name, 0, **given)  # type: ignore[arg-type]


def test_the_table_of_children(tmp_path: Path) -> None:
    plan = made_plan(servers=2)
    training, inference = context(tmp_path, plan), context(tmp_path, plan, "inference")
    assert [spec.name for spec in service_specs(training)] == ["data", "rollout"]
    assert [spec.name for spec in rank_specs(training, 3)] == ["rank-0", "rank-1"]
    assert [spec.name for spec in server_specs(inference)] == ["server-0", "server-1"]
    assert not service_specs(inference) and not rank_specs(inference, 3) and not server_specs(training)
    words = list(rank_specs(training, 3)[1].command)
    assert words[1:4] == ["-P", "-m", "launcher.roles.trainer"]
    for flag, value in {"--rank": "1", "--world": "2", "--generation": "3", "--store": "127.0.0.1:2"}.items():
        assert words[words.index(flag) + 1] == value
    assert [spec.name for spec in service_specs(context(tmp_path, made_plan(servers=0)))] == ["data"]
    assert lead_node(plan) == "training-0" and lead_node(made_plan(ranks=0)) == "inference-0"


def test_every_process_sees_its_own_gpus_of_those_that_are_visible(tmp_path: Path) -> None:
    servers = Node(0, 0, [0, 1], [Server("server-0", [0, 1])], [])
    ranks = Node(0, 0, [2, 3], [], [Rank(0, 0, 2), Rank(1, 1, 3)])
    partitions = [
        Partition("inference", "embedded", 1, 1, 2, 1, 1, [servers]),
        Partition("training", "archon", 2, 1, 1, 1, 1, [ranks]),
    ]
    plan = Plan("r", "cuda", False, [], [], partitions, BATCH, [], 0, [], [], {})
    seen = [spec.env["CUDA_VISIBLE_DEVICES"] for spec in rank_specs(context(tmp_path, plan), 0)]
    assert seen == ["2", "3"]
    given = context(tmp_path, plan, "inference", visible_gpus=("4", "5", "6", "7"))
    assert server_specs(given)[0].env["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert service_specs(context(tmp_path, plan))[0].env["CUDA_VISIBLE_DEVICES"] == ""
    assert "OMP_NUM_THREADS" not in server_specs(given)[0].env


def test_environment_of_the_scheduling_spec_wins(tmp_path: Path) -> None:
    spec = service_specs(context(tmp_path, made_plan(), env_vars={"OMP_NUM_THREADS": "4", "MINE": "x"}))[0]
    assert spec.env["OMP_NUM_THREADS"] == "4" and spec.env["MINE"] == "x"


def test_runs_of_equal_name_have_different_local_directories(tmp_path: Path) -> None:
    a, b = RunDir(tmp_path / "a" / "e" / "t"), RunDir(tmp_path / "b" / "e" / "t")
    assert local_root(None, "e-t", a) != local_root(None, "e-t", b)
    assert local_root(str(tmp_path), "e-t", a).parent == tmp_path


def test_the_book_reads_what_was_written() -> None:
    plan = made_plan(servers=2)
    error = RunError("server-1", "died", "Traceback", "/x.log")
    values = dict.fromkeys(entries.keys(plan), "")
    assert Book(values).ending is None and Book(values).generation is None and not Book(values).servers()
    entry = ServerEntry("server-1", "", "embedded", "http://d", "out", 1.5, error)
    values |= dict(
        [
            entries.address("service", "data", "http://x"),
            entries.server(entry),
            entries.ranks("training-0", RanksReport(2, "died", error)),
            ("generation", "2"),
            ("phase", Ending(Phase.FAILED, error).text()),
        ]
    )
    book = Book(values)
    assert book.service("data") == "http://x" and book.service("rollout") is None
    assert book.servers() == [entry]
    assert book.ranks("training-0") == RanksReport(2, "died", error)
    assert book.generation == 2 and book.ending == Ending(Phase.FAILED, error)


def test_state_round_trip(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert read_state(run_dir) is None
    state = State(Phase.FAILED, 2, 1, 7, 1.5, error=RunError("data", "x"))
    written = write_state(run_dir, state)
    assert read_state(run_dir) == written
    assert written.updated > 0 and run_dir.state.stat().st_mode & 0o777 == 0o600


def test_on_a_full_disk_the_end_is_written_into_the_room_that_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run_dir = RunDir(tmp_path)
    before = write_state(run_dir, State(Phase.RUNNING, 1, error=RunError("rank-0", "m", "t" * 200)))
    monkeypatch.setattr(state, "write_atomic", full)
    with pytest.raises(OSError, match="No space left"):
        write_state(run_dir, State(Phase.RUNNING, 2))
    assert read_state(run_dir) == before
    ended = write_state(run_dir, State(Phase.FAILED, 2))
    assert read_state(run_dir) == ended and ended.attempt == 2
    with pytest.raises(OSError, match="No space left"):
        write_state(run_dir, State(Phase.FAILED, 3, error=RunError("rank-0", "m", "t" * (1 << 20))))
    assert read_state(run_dir) == ended


def test_what_is_said_of_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    run_dir, full = RunDir(tmp_path / "run"), OSError(errno.ENOSPC, "No space left on device")
    assert run_dir.unwritable(run_dir.state, full) == (
        f"{run_dir.root} is gone: it was removed during the run, or its storage is not there any more"
    )
    run_dir.create()
    assert run_dir.ailment() == f"files of {run_dir.root} were removed during the run"
    run_dir.config.touch()
    assert run_dir.ailment() == ""
    said = run_dir.unwritable(run_dir.state, full)
    assert said == f"{run_dir.state} cannot be written: No space left on device; free some space there"


def test_storage_that_is_away_is_said_and_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, stale = RunDir(tmp_path / "run"), OSError(errno.ESTALE, "Stale file handle")
    run_dir.create()

    def away(path: Path, **words: object) -> os.stat_result:
        raise stale

    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", away)
        assert run_dir.ailment() == ""
        assert run_dir.unwritable(run_dir.state, stale).startswith(f"{run_dir.root} is gone: ")
        assert run_dir.log_file(1, "training", 0, "daemon").name == "daemon.log"
    run_dir.config.touch()
    zeros = os.statvfs_result((0,) * 10)
    monkeypatch.setattr(os, "statvfs", lambda path: zeros)
    assert run_dir.ailment() == "", "a file system that tells no sizes is not full"


def test_the_watchdog_sees_movement_in_counters_only() -> None:
    dog = Watchdog(10, now=0)
    status = {"step": 1, "uptime": 0.0, "wait_trainer_secs": 0.0, "servers": {"a": {"version": 1, "beat_age": 0.0}}}
    assert dog.stuck_for({"trainer": status}, 0) is None
    clocks = {**status, "uptime": 9.0, "wait_trainer_secs": 9.0, "servers": {"a": {"version": 1, "beat_age": 9.0}}}
    assert dog.stuck_for({"trainer": clocks}, 9) is None
    assert dog.stuck_for({"trainer": clocks}, 10) == 10
    moved = {**clocks, "servers": {"a": {"version": 2, "beat_age": 9.0}}}
    assert dog.stuck_for({"trainer": moved}, 11) is None
    assert dog.stuck_for({"trainer": moved}, 20) is None
    assert dog.stuck_for({"trainer": moved}, 21) == 10


def test_a_progress_entry_is_all_that_counts() -> None:
    assert progress({"progress": {"tokens": 3}, "noise": 1}) == {"tokens": 3}


@pytest.mark.parametrize("phase", list(Phase))
def test_which_phases_are_final(phase: Phase) -> None:
    assert phase.final == (phase in ("done", "failed", "cancelled"))


def test_what_a_killed_daemon_left_in_memory_goes_with_the_next_start_on_the_machine(tmp_path: Path) -> None:
    left, alive, mine = (tmp_path / f"{run}-0123abcd" / "inference-0" for run in ("killed", "alive", "mine"))
    dead = local_dir.make(left)
    (left / "v000007-r0").mkdir()
    held = local_dir.make(alive)
    (alive / "v000008-r0").mkdir()
    os.close(dead)  # as the kernel does for a process that is killed
    new = local_dir.make(mine)
    assert not left.parent.exists()
    assert (alive / "v000008-r0").is_dir() and mine.is_dir()
    for each in (held, new):
        os.close(each)


def test_a_directory_that_may_be_in_use_is_never_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, mine = (tmp_path / f"{run}-0123abcd" / "inference-0" for run in ("killed", "mine"))

    def left() -> None:
        os.close(local_dir.make(path))
        (path / "v000007-r0").mkdir()

    def survives() -> bool:
        local_dir.sweep(tmp_path)
        return (path / "v000007-r0").is_dir()

    left()
    with monkeypatch.context() as patch:  # paths.local on storage that other machines see: locks may mean nothing there
        patch.setattr(local_dir.platform, "node", lambda: "another-machine")
        assert survives()
    other = os.stat(path / local_dir.HELD)  # noqa: PTH116
    taken = local_dir.fcntl.flock

    def come_between(handle: int, how: int) -> None:
        """The run's next daemon made it anew after the one that sweeps had opened the old lock."""
        monkeypatch.setattr(local_dir.fcntl, "flock", taken)
        if not how & local_dir.fcntl.LOCK_NB or os.fstat(handle).st_ino != other.st_ino:
            return taken(handle, how)
        left()
        return taken(handle, how)

    monkeypatch.setattr(local_dir.fcntl, "flock", come_between)
    assert survives()
    with monkeypatch.context() as patch:  # in /tmp anybody may make such a directory, and later a link of it
        patch.setattr(local_dir.os, "getuid", lambda: os.geteuid() + 1)
        assert survives()
    assert not survives(), "the last time nothing spoke for it"
    os.close(local_dir.make(mine))


def test_a_directory_in_use_is_not_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_dir, "FREE_SECS", 0.1)
    path = tmp_path / "run-0123abcd" / "inference-0"
    held = local_dir.make(path)
    (path / "v000007-r0").mkdir()
    with pytest.raises(OSError, match=r"inference-0 is held by another node daemon of this run on this machine"):
        local_dir.make(path)
    assert (path / "v000007-r0").is_dir()
    os.close(held)
    os.close(local_dir.make(path))
    assert not (path / "v000007-r0").exists()
