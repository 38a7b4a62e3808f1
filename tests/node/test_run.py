"""Whole runs of stand-in processes: from start to every way of ending, with nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from core.rpc.client import Client
from core.telemetry.files import append_line
from launcher.attached import Attendance
from launcher.commands.status import status_text
from launcher.liveness import look
from launcher.run_dir import RunDirError
from tests.node.conftest import FakeRun
from tests.node.living import until

Make = Callable[..., FakeRun]
ALL = 5  # data, rollout, server-0, rank-0, rank-1


def finished(process: subprocess.Popen[str], seconds: float = 100) -> tuple[int, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out + err


def daemon_pids(run: FakeRun) -> dict[str, int]:
    """By partition; a daemon's own process, not its guard."""
    found = {}
    for line in run.survivors():
        words = line.split()
        if "launcher.node" in words and words[2] == "-P":
            found[words[words.index("--partition") + 1]] = int(words[0])
    return found


def grandchildren(run: FakeRun) -> set[int]:
    return {int(line.split()[0]) for line in run.survivors() if "import time; time.sleep(600)" in line}


def test_a_run_ends_when_all_ranks_have(fake_run: Make) -> None:
    run = fake_run()
    code, said = finished(run.launch())
    assert (code, run.state.phase) == (0, "done"), said
    assert not run.survivors()
    assert not run.local.exists()
    assert run.state.error is None and run.state.generation == 0
    started = {each["name"]: each for each in run.started()}
    assert set(started) == {"data", "rollout", "server-0", "rank-0", "rank-1"}
    assert all(
        each["env"]["OMP_NUM_THREADS"] == "1" and each["env"]["HF_HUB_OFFLINE"] == "1" for each in started.values()
    )
    assert started["rank-0"]["local"].startswith(str(run.local))
    logs = {str(path.relative_to(run.run_dir.logs)) for path in run.run_dir.logs.glob("*/*/*.log")}
    assert logs == {
        *(f"1/training-0/{name}.log" for name in ("daemon", "data", "rollout", "rank-0", "rank-1")),
        *(f"1/inference-0/{name}.log" for name in ("daemon", "server-0")),
    }


def test_training_alone_has_no_rollout(fake_run: Make) -> None:
    run = fake_run(servers=0)
    assert finished(run.launch())[0] == 0
    assert {each["name"] for each in run.started()} == {"data", "rank-0", "rank-1"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_everything(fake_run: Make, number: signal.Signals) -> None:
    run = fake_run(behaviour={"rank-0": "serve", "rank-1": "serve"})
    launcher = run.launch()
    run.await_started(ALL)
    append_line(run.run_dir.metrics, {"kind": "step", "step": 7})  # more than the trainer has told its daemon of
    launcher.send_signal(number)
    code, said = finished(launcher)
    assert (code, run.state.phase) == (130, "cancelled"), said
    assert not run.survivors()
    assert "resume" in said and f"cancelled after step 7: {run.run_dir.root}" in said


def heard(launcher: subprocess.Popen[str], words: str) -> None:
    assert launcher.stderr is not None
    assert any(words in line for line in launcher.stderr), f"never said: {words}"


def rest(launcher: subprocess.Popen[str]) -> str:
    """What it says until it ends: read as `heard` reads, so that nothing is lost between."""
    assert launcher.stderr is not None
    text = launcher.stderr.read()
    launcher.wait(timeout=60)
    return text


def test_a_second_signal_does_not_wait(fake_run: Make) -> None:
    run = fake_run(servers=0, behaviour=dict.fromkeys(("data", "rank-0", "rank-1"), "hang"))
    launcher = run.launch()
    run.await_started(3)
    launcher.send_signal(signal.SIGINT)
    heard(launcher, "again kills at once")
    launcher.send_signal(signal.SIGTERM)
    assert "SIGTERM: ending every process of the run (killing)" in rest(launcher)
    assert not run.survivors()


def test_a_signal_that_arrives_twice_is_one(fake_run: Make) -> None:
    """GNU timeout signals its child and then its group: that must not kill before memory is given back."""
    run = fake_run(servers=0, behaviour={"rank-0": "serve", "rank-1": "serve"})
    launcher = run.launch()
    run.await_started(3)
    launcher.send_signal(signal.SIGTERM)
    heard(launcher, "again kills at once")
    launcher.send_signal(signal.SIGTERM)
    assert "(killing)" not in rest(launcher)
    assert (launcher.returncode, run.state.phase) == (130, "cancelled")
    assert not run.survivors() and not run.local.exists()


def test_a_stopped_launcher_stops_nothing_else(fake_run: Make) -> None:
    run = fake_run()
    launcher = run.launch()
    run.await_started(1)
    launcher.send_signal(signal.SIGSTOP)
    assert run.state.phase != "done"
    run.await_phase("done", seconds=90)
    until(lambda: len(run.survivors()) <= 2, 30, "only the daemons' guards, which the launcher has yet to wait for")
    launcher.send_signal(signal.SIGCONT)
    code, said = finished(launcher)
    assert code == 0, said
    assert not run.survivors()


def test_the_same_signal_counts_again_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("launcher.attached.time", SimpleNamespace(monotonic=lambda: now[0]))
    attendance = Attendance(cast(Any, None), cast(Any, None))
    counts = []
    with attendance._signals():
        for later in (0.0, 0.4, 0.4, 0.4, 0.4):
            now[0] += later
            signal.raise_signal(signal.SIGINT)
            counts.append(attendance.signals)
    assert counts == [1, 1, 1, 2, 2]


def test_kill_9_of_the_launcher_leaves_nothing(fake_run: Make) -> None:
    run = fake_run(behaviour={"rank-0": "hang", "rank-1": "serve", "data": "hang"})
    launcher = run.launch()
    run.await_started(ALL)
    launcher.kill()
    launcher.wait()
    until(lambda: not run.survivors(), 90, "no process left")
    assert not run.local.exists()


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("partition", ["training", "inference"])
def test_kill_9_of_a_daemon_leaves_nothing(fake_run: Make, partition: str, attached: bool) -> None:
    run = fake_run(behaviour={"rank-0": "serve", "rank-1": "hang", "server-0": "hang"})
    launcher = run.launch(*([] if attached else ["submit"]))
    run.await_started(ALL)
    until(lambda: len(run.daemon().get("/registry")["daemons"]) == 2, 90)
    os.kill(daemon_pids(run)[partition], signal.SIGKILL)
    until(lambda: not run.survivors(), 60, "no process left")
    assert not run.local.exists(), "node-local memory is given back although the daemon could not do it"
    if attached:
        code, said = finished(launcher)
        assert code == 1 and run.state.phase == "failed"
        assert f"daemon of {partition}-0" in said
    elif partition == "inference":
        assert run.state.phase == "failed"
        assert run.state.error and run.state.error.process == "daemon of inference-0"
    else:
        assert look(run.run_dir).dead


@pytest.mark.parametrize("partition", ["training", "inference"])
def test_a_daemon_that_is_stopped_is_noticed(fake_run: Make, partition: str) -> None:
    behaviour = {"rank-0": "serve", "rank-1": "serve", "server-0": "serve"}
    run = fake_run(overrides=("deadlines.daemon=4",), behaviour=behaviour)
    launcher = run.launch()
    run.await_started(ALL)
    until(lambda: len(run.daemon().get("/registry")["daemons"]) == 2, 90)
    os.kill(daemon_pids(run)[partition], signal.SIGSTOP)
    code, said = finished(launcher, 60)
    assert (code, run.state.phase) == (1, "failed"), said
    assert run.state.error and run.state.error.process == f"daemon of {partition}-0", run.state.error
    assert "no heartbeat for" in said
    assert not run.survivors()
    assert not run.local.exists()


@pytest.mark.parametrize("attached", [True, False])
def test_a_run_whose_directory_goes_away_ends(fake_run: Make, tmp_path: Path, attached: bool) -> None:
    run = fake_run(behaviour={"rank-0": "serve", "rank-1": "serve"})
    launcher = run.launch(*([] if attached else ["submit"]))
    run.await_started(ALL)
    run.run_dir.root.rename(tmp_path / "elsewhere")
    if attached:
        code, said = finished(launcher, 60)
        assert code == 1
        assert f"run directory: {run.run_dir.root} is gone" in said and "Traceback" not in said
    until(lambda: not run.survivors(), 60, "no process left")
    assert not run.local.exists() and not run.run_dir.root.exists()


def test_two_runs_started_in_the_same_second_both_finish(fake_run: Make) -> None:
    runs = [fake_run("a"), fake_run("b")]
    launchers = [run.launch() for run in runs]
    assert [finished(launcher)[0] for launcher in launchers] == [0, 0]
    assert [run.state.phase for run in runs] == ["done", "done"]


def test_a_child_that_dies_at_once_again_and_again_ends_the_run(fake_run: Make) -> None:
    run = fake_run(servers=0, behaviour={"data": "die", "rank-0": "serve", "rank-1": "serve"})
    code, said = finished(run.launch())
    assert (code, run.state.phase) == (1, "failed")
    assert run.state.error and run.state.error.process == "data"
    assert "died 3 times in a row, exit status 1: ValueError: data cannot read row 7 of train.parquet" in said
    assert "Traceback (most recent call last):" in said
    assert run.state.error.log in said and run.state.error.log.endswith("logs/1/training-0/data.log")
    assert len([each for each in run.started() if each["name"] == "data"]) == 3
    assert not run.survivors()


def test_what_another_start_would_not_mend_is_told_as_such(fake_run: Make) -> None:
    run = fake_run(servers=0, behaviour={"data": "give_up", "rank-0": "serve", "rank-1": "serve"})
    code, said = finished(run.launch())
    assert code == 1 and "data: exit status 4: RowsError: train.parquet is not readable parquet" in said
    assert f"once that is mended: python -m launcher resume {run.run_dir.root}\n" in said and "go on with" not in said
    assert len([each for each in run.started() if each["name"] == "data"]) == 1
    asked = status_text(run.run_dir, look(run.run_dir), 0.0)
    assert "going on would end the same way; once that is mended: python -m launcher resume" in asked


def test_a_flapping_server_is_left_out_and_named(fake_run: Make) -> None:
    run = fake_run(servers=2, behaviour={"server-1": "die", "rank-0": "serve", "rank-1": "serve"})
    launcher = run.launch()
    servers = lambda: {each["name"]: each for each in run.daemon().get("/registry")["servers"]}  # noqa: E731
    until(lambda: servers().get("server-1", {}).get("out") and servers()["server-0"]["state"] == "up", 90)
    assert run.state.phase == "running"
    assert "server-1 is left out: died 3 times" in run.run_dir.log(1, "inference", 0, "daemon").read_text()
    run.daemon().post("/stop", {})
    assert finished(launcher)[0] == 130


def test_a_run_whose_only_server_flaps_fails(fake_run: Make) -> None:
    run = fake_run(behaviour={"server-0": "die", "rank-0": "serve", "rank-1": "serve"})
    code, said = finished(run.launch())
    assert code == 1
    assert "server-0: died 3 times in a row, exit status 1: ValueError: server-0 cannot read row 7" in said


def test_a_service_that_dies_is_started_again(fake_run: Make) -> None:
    run = fake_run(servers=0, behaviour={"data": "die_once", "rank-0": "serve", "rank-1": "serve"})
    launcher = run.launch()
    until(lambda: len([each for each in run.started() if each["name"] == "data"]) == 2, 90)
    until(lambda: run.daemon().get("/registry")["services"].keys() == {"data", "trainer"}, 90)
    assert "=== start 2" in run.run_dir.log(1, "training", 0, "data").read_text()
    # its guard killed: the grandchild it left in a session of its own goes too, and another data service starts
    left = until(lambda: len(now := grandchildren(run)) == 3 and now, 60, "one each of data, rank-0 and rank-1")
    os.kill(run.daemon().get("/status")["children"]["data"]["pid"], signal.SIGKILL)
    until(lambda: len([each for each in run.started() if each["name"] == "data"]) == 3, 90)
    until(lambda: len(now := grandchildren(run)) == 3 and now != left, 60, "the new data service's in place of the old")
    run.daemon().post("/stop", {})
    finished(launcher)


def test_a_rank_that_dies_ends_the_run_without_recovery(fake_run: Make) -> None:
    run = fake_run(servers=0, behaviour={"rank-0": "serve", "rank-1": "die"})
    code, said = finished(run.launch())
    assert code == 1
    assert run.state.error and run.state.error.process == "rank-1"
    assert "rank-1: exit status 1: ValueError: rank-1 cannot read row 7" in said


def test_a_rank_that_dies_is_restarted_with_all_others(fake_run: Make) -> None:
    run = fake_run(servers=0, overrides=("recover.mode=on",), behaviour={"rank-1": "die_once", "rank-0": "serve"})
    launcher = run.launch()
    until(lambda: {(e["name"], e["generation"]) for e in run.started()} >= {("rank-0", 1), ("rank-1", 1)}, 90)
    until(lambda: run.daemon().get("/registry")["generation"] == 1, 60)
    assert run.state.generation == 1
    assert len([each for each in run.started() if each["name"] == "data"]) == 1
    run.daemon().post("/stop", {})
    finished(launcher)


def test_ranks_are_not_restarted_for_ever(fake_run: Make) -> None:
    run = fake_run(
        servers=0, overrides=("recover.mode=on", "recover.retries=2"), behaviour={"rank-0": "serve", "rank-1": "die"}
    )
    assert finished(run.launch())[0] == 1
    assert max(each["generation"] for each in run.started()) == 2
    assert run.state.generation == 2


def test_nothing_moves_for_watchdog_secs(fake_run: Make) -> None:
    run = fake_run(overrides=("watchdog_secs=12",), behaviour={"rank-0": "serve", "rank-1": "serve"})
    code, said = finished(run.launch())
    assert code == 1
    assert "watchdog: nothing moved for" in said
    log = run.run_dir.log(1, "training", 0, "daemon").read_text()
    assert "trainer: {" in log and "rollout: {" in log
    for name in ("data", "rollout", "rank-0", "rank-1"):
        assert "Current thread" in run.run_dir.log(1, "training", 0, name).read_text(), name


def test_the_registry_shows_everything_that_answers(fake_run: Make) -> None:
    run = fake_run(behaviour={"rank-0": "serve", "rank-1": "serve"})
    launcher = run.launch()

    def complete() -> dict | None:
        found = run.daemon().get("/registry")
        up = [each for each in found["servers"] if each["state"] == "up"]
        return found if len(found["services"]) == 3 and up and len(found["daemons"]) == 2 else None

    found = until(complete, 90)
    assert found["phase"] == "running" and found["generation"] == 0
    server = found["servers"][0]
    assert server["name"] == "server-0" and server["backend"] == "embedded"
    inference = next(each for each in found["daemons"] if each["partition"] == "inference")
    assert server["daemon"] == inference["url"]
    other = Client(inference["url"], run.run_dir.read_token())
    assert other.get("/registry")["services"] == found["services"]
    status = run.daemon().get("/status")
    assert status["children"]["data"]["state"] == "up"
    assert until(lambda: run.state.step == 3, 10)
    other.post("/restart", {"name": "server-0"})
    until(lambda: len([each for each in run.started() if each["name"] == "server-0"]) == 2, 60)
    run.daemon().post("/stop", {})
    finished(launcher)
    assert run.state.phase == "cancelled"


def test_a_fileroot_that_cannot_be_written_is_the_users_error(fake_run: Make, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match=r"cluster\.fileroot: .*file/smoke/t cannot be written: Not a directory"):
        fake_run(overrides=(f"cluster.fileroot={tmp_path}/file",))
