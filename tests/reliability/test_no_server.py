"""Nothing can be sampled any more: the last trained step is saved, and the run stops with the reason."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.broken_runs import Place, start, words_of
from tests.support.runs import ROOT, await_gone, command, environment, launcher, log_tails, steps

pytestmark = pytest.mark.timeout(300)


def test_a_reward_that_stops_the_run_costs_no_trained_step(tmp_path: Path) -> None:
    """The failure budget ends rollouts after a step that no checkpoint was due for."""
    launcher("make-model", str(tmp_path / "tiny"), "--pictures", str(tmp_path / "pictures")).expect()
    (tmp_path / "turning.py").write_text(
        "from pathlib import Path\n"
        "COUNT = Path(__file__).with_name('count')\n"
        "def reward(prompt, completion, prompt_ids, completion_ids, **row):\n"
        "    with COUNT.open('a') as file:\n"
        "        file.write('x')\n"
        "    if COUNT.stat().st_size > 40:\n"
        "        raise ValueError('it turned bad')\n"
        "    return float(len(completion) % 3)\n"
    )
    ended, run = start(
        Place(tmp_path, tmp_path), "turning", f"reward={tmp_path / 'turning.py'}:reward", "valid_dataset=null",
        "rollout.max_consecutive_failures=2", "recover.freq_steps=100", "rollout.max_head_offpolicyness=0",
        "total_train_steps=9", "recover.retries=0",
    )  # fmt: skip
    assert ended.status == 1, log_tails(run)
    assert "it turned bad" in ended.err
    trained = [record["step"] for record in steps(run)]
    assert trained and (run / "checkpoints" / f"step-{trained[-1]}").exists(), (trained, log_tails(run))
    launcher("audit", str(run)).expect()


def test_a_server_that_dies_at_every_start_costs_no_trained_step(tmp_path: Path) -> None:
    """The only one: it is left out and named, and nothing is left to wait for."""
    launcher("make-model", str(tmp_path / "tiny"), "--pictures", str(tmp_path / "pictures")).expect()
    words = words_of(
        Place(tmp_path, tmp_path), "dying", "valid_dataset=null", "recover.freq_steps=100", "total_train_steps=9999",
        "total_train_epochs=999",
    )  # fmt: skip
    run = tmp_path / "chaos" / "dying"
    process = subprocess.Popen(
        command(*words), cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 240
    while process.poll() is None:
        assert time.monotonic() < deadline, log_tails(run)
        if len(steps(run)) >= 2:
            for each in psutil.process_iter(["cmdline"]):
                line = each.info["cmdline"] or []
                if str(run) in line and line[1:4] == ["-P", "-m", "launcher.roles.embedded_server"]:
                    each.kill()
        time.sleep(0.1)
    _, said = process.communicate()
    assert process.returncode == 1, said
    assert "server-0: died 3 times in a row, ended by SIGKILL" in said, said
    await_gone(run)
    trained = [record["step"] for record in steps(run)]
    assert (run / "checkpoints" / f"step-{trained[-1]}").exists(), (trained, log_tails(run))
    launcher("audit", str(run)).expect()
