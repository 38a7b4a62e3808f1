"""Files of a run that are not what a run writes: the commands name file and line and exit 2, without a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from core.telemetry.files import append_line
from launcher.cli import main
from launcher.node.state import Phase, State, write_state
from launcher.run_dir import RunDir
from tests.node.conftest import FakeRun

Make = Callable[..., FakeRun]
COMMANDS = ("status", "logs", "why", "resume", "cancel")


@pytest.fixture
def ended(fake_run: Make) -> RunDir:
    run_dir = fake_run().run_dir
    write_state(run_dir, State(Phase.FAILED, 1))
    return run_dir


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(words) == 2, words
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "state.json:1: damaged: not JSON (Expecting value)"),
        ('{\n "phase": "failed",\n "atte', "state.json:3: damaged: not JSON (Unterminated string"),
        ("[]", "state.json:1: damaged: not an object"),
        ('{"attempt": 1}', "state.json:1: damaged: phase is missing"),
        ('{"attempt": 1, "phase": "lost"}', "state.json:1: damaged: 'lost' is not a valid Phase"),
        ('{\n "phase": "failed",\n "attempt": "one"}', "state.json:3: damaged: attempt is 'one', not a number"),
    ],
)
def test_a_damaged_state(ended: RunDir, capsys: pytest.CaptureFixture[str], text: str, words: str) -> None:
    ended.state.write_text(text)
    for command in COMMANDS:
        assert words in refused(capsys, command, str(ended.root)), command
    # one run that is damaged hides no other
    assert main(["list", str(ended.root.parents[1])]) == 0
    assert "damaged" in capsys.readouterr().out


def test_a_damaged_plan_or_rendezvous(ended: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    plan = ended.plan.read_text()
    for text, words in ((plan[:40], "plan.json:"), ("{}", "plan.json:1: damaged: partitions is missing")):
        ended.plan.write_text(text)
        assert words in refused(capsys, "resume", str(ended.root))
    ended.plan.unlink()
    assert "plan.json is missing" in refused(capsys, "resume", str(ended.root))
    ended.plan.write_text(plan)
    ended.rendezvous.write_text('{"attempt": 1, "daemon')
    for command in COMMANDS:
        assert "rendezvous.json:1: damaged: not JSON" in refused(capsys, command, str(ended.root))


def test_damaged_lines(ended: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(ended.root)
    for line in ({"kind": "step", "step": 1, "time": "now"}, {"kind": "step", "step": 1, "time": None, "secs": [1]}):
        append_line(ended.metrics, line)
        append_line(ended.metrics, {"kind": "step", "step": 1, "time": 1.0, "reward_mean": "much", "void": [1]})
        for command in ("report", "why", "status"):
            assert main([command, root]) == 0, (command, line)
        assert main(["audit", root]) == 1
    capsys.readouterr()
    append_line(ended.index, {"batch": 1})
    said = refused(capsys, "audit", root)
    assert said == f"{ended.index}:1: damaged: no number epoch; restore it from a copy, or mend this line\n"
    ended.index.unlink()
    ended.void.write_text(json.dumps({"epoch": 0, "position": 1, "reason": "x"}) + '\n{"epoch": 0}\n')
    assert f"{ended.void}:2: damaged: no number position" in refused(capsys, "audit", root)


def test_a_torn_last_line_is_no_damage(ended: RunDir, tmp_path: Path) -> None:
    ended.void.write_text(json.dumps({"epoch": 0, "position": 1, "reason": "x"}) + '\n{"epo')
    assert main(["audit", str(ended.root)]) == 0
