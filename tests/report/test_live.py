"""The live view: what `run` shows, in a terminal and as lines."""

from pathlib import Path

from rich.console import Console

from core.telemetry.files import append_line
from launcher.live import LiveView, duration, number, render, spark
from launcher.run_dir import RunDir
from tests.report.conftest import step_record


def shown(view: object) -> str:
    console = Console(width=140, record=True, force_terminal=False, file=None)
    with console.capture() as captured:
        console.print(view)
    return captured.get()


def test_the_view_has_every_number_that_is_asked_for(run_dir: RunDir) -> None:
    text = shown(render(run_dir, {"phase": "running", "attempt": 2, "error": None}))
    for word in (
        "exp/t0  running  attempt 2",
        "step  5",
        "reward  0.500",
        "accuracy  0.500",
        "valid 0.750 at step 5",
        "mean 0.50  max 2",
        "sampled 300  trained 500",
        "trainer 0.50 s for answers  servers 0.25 s for the trainer",
        "0.50 s to version 5",
        "ETA  55s",
        "failed 1",
    ):
        assert word in text, text


def test_the_view_of_a_run_that_has_not_begun(tmp_path) -> None:
    text = shown(render(RunDir(tmp_path / "e" / "t"), None))
    assert "e/t  starting" in text


def test_an_error_is_shown_as_it_is(run_dir: RunDir) -> None:
    text = shown(
        render(run_dir, {"phase": "failed", "error": {"process": "rank-0", "message": "[red]list[int][/red]"}})
    )
    assert "rank-0: [red]list[int][/red]" in text


def test_lines_of_earlier_attempts_are_not_shown_again(run_dir: RunDir) -> None:
    view = LiveView(run_dir)
    view.skip_old()
    append_line(run_dir.metrics, step_record(6))
    assert [line[:6] for line in view.new_lines()] == ["step 6"]
    assert "step  6" in shown(view.renderable(None))


def test_steps_that_teach_nothing_are_warned_of_once_in_ten(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    view = LiveView(run)
    for step in range(1, 25):
        append_line(run.metrics, {**step_record(step), "equal_reward_groups": 4 if step > 2 else 3})
    warnings = [line for line in view.new_lines() if line.startswith("warning: ")]
    assert [line.split(":")[1] for line in warnings] == [" step 3", " step 13", " step 23"]
    assert "equal rewards within each of its 4 groups" in warnings[0]
    assert "no signal" in shown(render(run, None))


def test_lines_come_once_each(run_dir: RunDir) -> None:
    view = LiveView(run_dir)
    lines = view.new_lines()
    assert len(lines) == 5 + 3 + 1
    assert lines[0].startswith(
        "step 1 · reward 0.100 · accuracy 0.100 · staleness 0.50 · tok/s 300 sampled 500 trained"
    )
    assert "evaluation valid at step 5: accuracy 0.750 over 8 rows, versions 5–5, 1.5 s" in lines
    assert view.new_lines() == []
    append_line(run_dir.metrics, step_record(6))
    (line,) = view.new_lines()
    assert line.startswith("step 6")


def test_sft_lines(run_dir: RunDir) -> None:
    view = LiveView(run_dir)
    view.new_lines()
    record = {"kind": "sft", "step": 7, "loss": 0.5, "phase": "mistaught", "tokens_per_s_train": 1234.5, "lr": 1e-3}
    append_line(run_dir.metrics, record)
    assert view.new_lines() == ["step 7 · mistaught · loss 0.500 · tok/s 1,234"]


def test_numbers_and_durations() -> None:
    assert [number(v) for v in (None, float("nan"), True, "x", 0, 1234.5678, 2e-6)] == ["–"] * 4 + [
        "0.000",
        "1,234.568",
        "2.0e-06",
    ]
    assert [duration(v) for v in (None, -1, 0, 59.6, 61, 3700)] == ["–", "–", "0s", "1m 00s", "1m 01s", "1h 01m"]


def test_spark_rises_with_its_values() -> None:
    assert spark([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert len(spark(list(range(1000)))) == 40
    assert spark([1.0]) == "" and spark([None, "x", 2, 2]) == "▁▁"
