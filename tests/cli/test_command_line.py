"""`python -m launcher` as a person types it: help at once, clear refusals, no torch, any working directory."""

import os
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from launcher.cli import COMMANDS, parse

ROOT = Path(__file__).resolve().parents[2]


def launcher(*arguments: str, cwd: Path = ROOT, safe: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *(["-P"] if safe else []), "-m", "launcher", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("command", [*COMMANDS, ""])
def test_help_shows_an_example(command: str) -> None:
    done = launcher(*[command] if command else [], "--help")
    assert done.returncode == 0, done.stderr
    assert "example: python -m launcher" in done.stdout
    assert done.stderr == ""


def test_help_takes_under_300_ms() -> None:
    took = []
    while len(took) < 10 and min(took, default=9.0) >= 0.3:
        took.append(_seconds("plan", "--help"))
    assert min(took) < 0.3, took


def _seconds(*arguments: str) -> float:
    """Of the processor: the wall is the neighbours' too."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    launcher(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_help_imports_neither_torch_nor_pydantic() -> None:
    code = "import sys, launcher.cli; sys.exit(sum(m in sys.modules for m in ('torch', 'pydantic', 'yaml', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pln", "x"], "there is no command 'pln'; did you mean plan?"),
        (["zzz"], "commands are prepare, plan, run"),
        (["plan", "nowhere.yaml"], "nowhere.yaml: cannot be read: No such file or directory"),
        (["plan", "configs/smoke.yaml", "actor.pth=x"], "override 'actor.pth=x': actor.pth: unknown key"),
        (["plan", "configs/smoke.yaml", "another.yaml"], "override 'another.yaml': wants key.sub=value"),
        (["report", "no/such"], "no run 'no/such'"),
        (["plan"], "the following arguments are required: CONFIG"),
        (["plan", "configs/smoke.yaml", "--emulat"], "unrecognized arguments: --emulat; did you mean --emulate?"),
        (["list", "/no/such/dir"], "/no/such/dir: no such directory"),
    ],
)
def test_user_errors_exit_2_without_a_traceback(arguments: list[str], said: str) -> None:
    done = launcher(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("command", ["run", "submit"])
def test_help_shows_what_comes_before_a_first_run(command: str) -> None:
    said = launcher(command, "--help").stdout
    assert "launcher prepare CONFIG" in said and "launcher plan CONFIG" in said
    assert "launcher make-model runs/models/tiny --pictures runs/models/pictures" in said


def test_ctrl_c_while_modules_are_imported_is_one_line(tmp_path: Path) -> None:
    """A module that ours imports is made to wait: so it is interrupted there, and not by luck."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        "class Waits:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'core.config.errors':\n"
        "            print('importing', flush=True); time.sleep(60)\n"
        "sys.meta_path.insert(0, Waits())\n"
    )
    command = [sys.executable, "-P", "-m", "launcher", "plan", "configs/smoke.yaml"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    pipe = subprocess.PIPE
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell's background job is made deaf to it
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, preexec_fn=hears
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=30)[1]
    assert (process.returncode, err) == (130, "interrupted\n")


def test_nothing_said_prints_the_overview() -> None:
    done = launcher()
    assert done.returncode == 2 and "submit" in done.stdout


def test_options_may_stand_among_the_overrides() -> None:
    arguments = parse("run", ["c.yaml", "a=1", "--emulate", "b.c=-2", "--json"])
    assert (arguments.config, arguments.overrides) == (Path("c.yaml"), ["a=1", "b.c=-2"])
    assert arguments.emulate and arguments.json


def test_make_model_passes_its_sizes_through() -> None:
    arguments = parse("make-model", ["out", "--hidden", "32", "--pictures", "p", "--untied"])
    assert arguments.sizes == ["--hidden", "32", "--untied"]
    assert (arguments.out, arguments.pictures) == (Path("out"), Path("p"))


def test_a_working_directory_with_core_and_models_of_its_own(tmp_path: Path) -> None:
    for name in ("core", "models", "yaml"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the user's own')\n")
    (tmp_path / "mine.yaml").write_text("experiment_name: e\nseed: x\n")
    done = launcher("plan", "mine.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "mine.yaml:2: seed: wants a whole number; found 'x'" in done.stderr


def test_a_working_directory_with_a_launcher_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "__main__.py").write_text("print('not ours')\n")
    done = launcher("--help", cwd=tmp_path, safe=True)
    assert done.returncode == 0 and "python -m launcher COMMAND" in done.stdout


def test_make_model_writes_a_checkpoint_from_anywhere(tmp_path: Path) -> None:
    done = launcher("make-model", "tiny", "--hidden", "64", "--heads", "2", "--kv-heads", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tiny" / "config.json").is_file()


def test_make_model_refuses_impossible_sizes(tmp_path: Path) -> None:
    done = launcher("make-model", str(tmp_path / "tiny"), "--heads", "7")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and done.stderr
