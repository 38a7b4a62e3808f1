"""status, logs, cancel, resume and the refusals, as a person types them, on runs that live, end and die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from core.config import load
from core.telemetry.files import append_line
from launcher.commands.status import status_text
from launcher.emulate import tiny_checkpoint
from launcher.launch import REFUSED, AliveError, RunExistsError, begin, begin_again
from launcher.liveness import Liveness, look
from launcher.node.specs import REPOSITORY
from launcher.node.state import Phase, RunError, State, heartbeat_file, read_rendezvous, read_state, write_state
from tests.node.conftest import FakeRun
from tests.node.living import until

Make = Callable[..., FakeRun]
TRAINING_ALONE = {"servers": 0, "behaviour": {"rank-0": "serve", "rank-1": "serve"}}


def launcher(*words: object, seconds: float = 90) -> tuple[int, str]:
    command = [sys.executable, "-P", "-m", "launcher", *map(str, words)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, cwd=REPOSITORY)
    return done.returncode, done.stdout + done.stderr


def submitted(run: FakeRun) -> int:
    """Starts it detached and returns its lead daemon's pid, once everything is up."""
    code = run.launch("submit").wait(timeout=60)
    assert code == 0
    run.await_started(3)
    until(lambda: look(run.run_dir).answer, 90)
    found = read_rendezvous(run.run_dir)
    assert found is not None
    return found.pid


def killed(run: FakeRun) -> None:
    os.kill(submitted(run), signal.SIGKILL)
    until(lambda: not run.survivors(), 60, "no process left")


def test_submit_returns_status_shows_cancel_ends(fake_run: Make) -> None:
    run = fake_run(**TRAINING_ALONE)
    submitted(run)
    until(lambda: len(run.daemon().get("/registry")["services"]) == 2, 60)
    until(lambda: run.daemon().get("/status")["children"]["rank-1"]["state"] == "up", 30)
    code, said = launcher("status", run.run_dir.root)
    assert code == 0 and f"{run.run_dir.root}: running" in said and "rank-1" in said and "resume" not in said
    found = json.loads(launcher("status", run.run_dir.root, "--json")[1])
    assert found["alive"] and found["verdict"] == "running" and found["resume"] is None
    assert launcher("cancel", run.run_dir.root) == (0, f"cancelled: {run.run_dir.root}\n")
    until(lambda: not run.survivors(), 30)
    code, said = launcher("status", run.run_dir.root)
    assert f"{run.run_dir.root}: cancelled" in said and f"python -m launcher resume {run.run_dir.root}" in said
    assert "not alive (cancelled)" in launcher("cancel", run.run_dir.root)[1]


def test_a_dead_run_is_called_dead_whatever_its_state_file_says(fake_run: Make) -> None:
    run = fake_run(**TRAINING_ALONE)
    killed(run)
    died = heartbeat_file(run.run_dir).stat().st_mtime
    assert run.state.phase == "running"
    with run.run_dir.log(1, "training", 0, "data").open("a") as file:
        file.write("Traceback (most recent call last):\n  File 'x', line 1\nValueError: the last thing it said\n")
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(died))
    for words in (("status", run.run_dir.root), ("logs", run.run_dir.root), ("logs", run.run_dir.root, "-f")):
        code, said = launcher(*words)
        assert code == 0
        assert f"dead since {when}" in said, words
        assert "data: ValueError: the last thing it said" in said
        assert f"python -m launcher resume {run.run_dir.root}" in said
    found = json.loads(launcher("status", run.run_dir.root, "--json")[1])
    assert found["verdict"] == "dead" and not found["alive"] and found["since"] == died


def test_status_words_what_a_service_says(fake_run: Make) -> None:
    run = fake_run()
    trainer = {"step": 2, "phase": "step", "eta_secs": 200.4, "phase_secs": 14.109737, "since": 1796091439.2164898}
    services = {"trainer": {"name": "trainer", **trainer, "loss": 1 / 3}}
    found = Liveness(True, run.state, answer={"phase": "running", "children": {}, "services": services})
    lines = status_text(run.run_dir, found, time.time()).splitlines()
    assert "  trainer: step 2, phase step, eta 3m 20s, phase lasts 14s, loss 0.333" in lines
    assert "  ends in about 3m 20s" in lines


def test_a_daemon_that_is_busy_is_not_dead_while_it_beats(fake_run: Make) -> None:
    """A stopped daemon does not answer; its heartbeat (kept up by another process here) says that it lives."""
    run = fake_run(**TRAINING_ALONE)
    pid = submitted(run)
    os.kill(pid, signal.SIGSTOP)
    beat = ["/bin/sh", "-c", 'while :; do touch "$0"; sleep 0.2; done', str(heartbeat_file(run.run_dir))]
    with subprocess.Popen(beat) as beating:
        found = look(run.run_dir)
        assert found.alive and found.answer is None
        said = launcher("status", run.run_dir.root)[1]
        assert "alive, but its daemon does not answer" in said
        beating.kill()
    assert look(run.run_dir).dead
    os.kill(pid, signal.SIGCONT)
    until(lambda: look(run.run_dir).answer, 30)
    launcher("cancel", run.run_dir.root)


def test_two_attempts_never_overlap(fake_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lead daemon is stopped, so it looks dead; its processes are still there, so it cannot be resumed."""
    run = fake_run(**TRAINING_ALONE)
    pid = submitted(run)
    os.kill(pid, signal.SIGSTOP)
    monkeypatch.setattr("launcher.launch.ENDING_SECS", 1.0)
    with pytest.raises(AliveError, match=r"processes of the last attempt .* are still there"):
        begin_again(run.run_dir, [])
    os.kill(pid, signal.SIGCONT)
    assert run.state.attempt == 1
    until(lambda: look(run.run_dir).answer, 30)
    launcher("cancel", run.run_dir.root)


def test_somebody_elses_daemon_on_the_same_port_is_not_ours(fake_run: Make) -> None:
    living, gone = fake_run("living", **TRAINING_ALONE), fake_run("gone", **TRAINING_ALONE)
    submitted(living)
    gone.run_dir.rendezvous.write_bytes(living.run_dir.rendezvous.read_bytes())
    write_state(gone.run_dir, State(phase=living.state.phase, attempt=1))
    assert look(living.run_dir).alive
    assert look(gone.run_dir).dead
    launcher("cancel", living.run_dir.root)


def test_logs_of_one_process_and_following_to_the_end(fake_run: Make) -> None:
    run = fake_run(servers=0, behaviour={"rank-0": "serve", "rank-1": "serve", "data": "die_once"})
    submitted(run)
    follower = subprocess.Popen(
        [sys.executable, "-P", "-m", "launcher", "logs", str(run.run_dir.root), "-f"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    code, said = launcher("logs", run.run_dir.root, "-p", "nobody")
    assert code == 2 and "no log of 'nobody'" in said and "rank-0" in said
    until(lambda: "dies once" in run.run_dir.log(1, "training", 0, "data").read_text(), 60)
    code, said = launcher("logs", run.run_dir.root, "-p", "data")
    assert "[training-0/data] ValueError: data dies once" in said and "rank" not in said
    launcher("cancel", run.run_dir.root)
    out, _ = follower.communicate(timeout=60)
    assert "[training-0/data] ValueError: data dies once" in out
    assert "[training-0/daemon]" in out and "ending: cancelled" in out


def test_a_run_directory_is_never_started_twice(fake_run: Make) -> None:
    run = fake_run(**TRAINING_ALONE)
    submitted(run)
    config = load(run.run_dir.config, [])
    with pytest.raises(RunExistsError, match="is alive"):
        begin(config, run.plan)
    code, said = finished(run.launch("resume"))
    assert code == 2 and "is alive" in said
    launcher("cancel", run.run_dir.root)
    with pytest.raises(RunExistsError, match=r"is a run already \(cancelled, step 3\)") as caught:
        begin(config, run.plan)
    assert f"python -m launcher resume {run.run_dir.root}\n" in str(caught.value)
    assert "trial_name=" in str(caught.value)
    assert run.state.attempt == 1


def test_a_name_whose_job_slurm_refused_is_free(fake_run: Make) -> None:
    run = fake_run(**TRAINING_ALONE)
    config = load(run.run_dir.config, [])
    refusal = RunError(REFUSED, "sbatch: error: invalid partition specified: gpu")
    write_state(run.run_dir, State(Phase.FAILED, 2, error=refusal))
    with pytest.raises(RunExistsError, match="is a run already"):
        begin(config, run.plan)
    write_state(run.run_dir, State(Phase.FAILED, 1, error=refusal))
    begin(config, run.plan)
    assert run.state.phase == "starting" and run.state.error is None


def finished(process: subprocess.Popen[str], seconds: float = 100) -> tuple[int, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out + err


def test_a_disk_that_takes_nothing_more_is_said_before_anything_starts(cache: Path, tmp_path: Path) -> None:
    words = [sys.executable, "-P", "-m", "launcher", "run", "--emulate", "configs/smoke.yaml"]
    words += [f"actor.path={tiny_checkpoint(cache)}", f"cluster.fileroot={tmp_path}", f"paths.cache={cache}"]
    words += [f"train_dataset.path={cache / 'rows'}", "valid_dataset=null"]
    done = subprocess.run(  # a limit of no bytes for any file stands for the disk
        ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", *words],
        capture_output=True, text=True, timeout=90, cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"{tmp_path / 'smoke' / 'trial0'}" in done.stderr and "File too large" in done.stderr
    no_local = subprocess.run(
        [*words, "paths.local=/proc/none"], capture_output=True, text=True, timeout=90, cwd=REPOSITORY
    )
    assert no_local.returncode == 2 and "Traceback" not in no_local.stderr
    assert "paths.local: /proc/none/smoke-trial0" in no_local.stderr and "cannot be made" in no_local.stderr


def test_resume_is_a_new_attempt_of_the_same_run(fake_run: Make) -> None:
    run = fake_run(**TRAINING_ALONE)
    killed(run)
    run.behave()  # this time the ranks finish
    before = run.run_dir.read_token()
    append_line(run.run_dir.metrics, {"kind": "step", "step": 1})
    code, said = finished(run.launch("resume", "total_train_steps=9"))
    assert code == 0 and "step 1 ·" not in said, said
    state = read_state(run.run_dir)
    assert state and (state.phase, state.attempt, state.generation) == ("done", 2, 1)
    assert load(run.run_dir.config, []).total_train_steps == 9
    assert load(run.run_dir.logs / "1" / "config.yaml", []).total_train_steps == 3
    assert {each["generation"] for each in run.started() if each["name"] == "rank-0"} == {0, 1}
    assert (run.run_dir.logs / "2" / "training-0" / "rank-0.log").exists()
    assert run.run_dir.read_token() == before
    code, said = finished(run.launch("resume"))
    assert code == 2 and "is done" in said and "total_train_steps=" in said
    said = launcher("status", run.run_dir.root)[1]
    assert (
        f"go on with: python -m launcher resume {run.run_dir.root} total_train_steps={2 * max(1, state.step)}\n" in said
    )
    code, said = finished(run.launch("resume", "trial_name=other"))
    assert code == 2 and "would be another run" in said
    code, said = finished(run.launch("resume", "actor.optimiser.lr=1"))
    assert code == 2 and "actor.optimizer" in said and "Traceback" not in said
    assert read_state(run.run_dir) == state


def test_no_such_run() -> None:
    for command in ("status", "logs", "cancel", "resume"):
        code, said = launcher(command, "no/such")
        assert code == 2 and "no run 'no/such'" in said and "Traceback" not in said
