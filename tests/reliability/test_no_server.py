"""No server is left: the run waits its deadline, saves the last step, and stops with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.broken_runs import Place, start
from tests.support.runs import launcher, log_tails, steps

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
