"""The guard, as a process among processes: whatever ends it, no process of its tree is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.node import guard
from tests.node.living import alive, until

GUARD = Path(guard.__file__)

# writes its pid, starts a child that double-forks into a session of its own, and ignores what it is told to ignore
TREE = """
import os, signal, sys, time
out, ignore, life = sys.argv[1], sys.argv[2] == "ignore", float(sys.argv[3])
def note(name):
    with open(os.path.join(out, name + ".tmp"), "w") as file: file.write(str(os.getpid()))
    os.rename(os.path.join(out, name + ".tmp"), os.path.join(out, name))
if ignore: signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        note("grandchild")
        time.sleep(600)
    os._exit(0)
os.wait()
note("child")
time.sleep(life)
sys.exit(5)
"""


def pid_in(path: Path) -> int:
    return int(until(path.exists) and path.read_text())


class Tree:
    def __init__(self, where: Path, *, ignore: bool = False, life: float = 600, grace: float = 0.5) -> None:
        self.log = where / "log"
        with self.log.open("wb") as log:
            self.guard = subprocess.Popen(
                [
                    *(sys.executable, "-S", "-E", "-P", str(GUARD), "--grace", str(grace), "--final", "0.3", "--"),
                    *(sys.executable, "-c", TREE, str(where), "ignore" if ignore else "obey", str(life)),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.child, self.grandchild = pid_in(where / "child"), pid_in(where / "grandchild")

    def gone(self) -> bool:
        return not alive(self.child) and not alive(self.grandchild)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Callable[..., Tree]]:
    made: list[Tree] = []

    def make(**options: object) -> Tree:
        made.append(Tree(tmp_path, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.guard.kill()
        each.guard.wait()
        if alive(each.grandchild):
            os.kill(each.grandchild, signal.SIGKILL)


def run_guarded(*command: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-S", "-E", "-P", str(GUARD), "--", *command]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        assert p.stdout and p.stderr
        out, err = p.stdout.read(), p.stderr.read()
        return subprocess.CompletedProcess(words, p.wait(timeout=20), out, err)


def test_the_exit_status_is_the_commands() -> None:
    assert run_guarded("/bin/sh", "-c", "exit 7").returncode == 7
    assert run_guarded("/bin/sh", "-c", "exit 0").returncode == 0
    assert run_guarded("/bin/sh", "-c", "kill -9 $$").returncode == 128 + 9
    assert run_guarded("/bin/sh", "-c", "echo hello; cat").stdout == "hello\n"


def test_a_command_that_does_not_exist_is_named() -> None:
    done = run_guarded("/no/such/program")
    assert done.returncode == 127
    assert "/no/such/program cannot be started: No such file or directory" in done.stderr


@pytest.mark.parametrize("ignore", [False, True])
def test_end_of_the_parents_pipe_ends_the_tree(tree: Callable[..., Tree], ignore: bool) -> None:
    each = tree(ignore=ignore)
    assert each.guard.stdin
    each.guard.stdin.close()
    assert each.guard.wait(timeout=20) == 128 + (signal.SIGKILL if ignore else signal.SIGTERM)
    assert each.gone()
    assert "the parent is gone" in each.log.read_text()


@pytest.mark.parametrize("ignore", [False, True])
def test_term_ends_the_tree(tree: Callable[..., Tree], ignore: bool) -> None:
    each = tree(ignore=ignore)
    each.guard.terminate()
    each.guard.wait(timeout=20)
    assert each.gone()


def test_a_second_term_does_not_wait_for_the_grace(tree: Callable[..., Tree]) -> None:
    each = tree(ignore=True, grace=600)
    each.guard.terminate()
    until(lambda: "TERM to the command" in each.log.read_text())
    started = time.monotonic()
    each.guard.terminate()
    each.guard.wait(timeout=20)
    assert each.gone() and time.monotonic() - started < 10


def test_what_outlives_the_command_is_ended(tree: Callable[..., Tree]) -> None:
    each = tree(life=0.1)
    assert each.guard.wait(timeout=20) == 5
    assert not alive(each.grandchild)


def test_a_killed_guard_takes_the_command_with_it(tree: Callable[..., Tree]) -> None:
    each = tree(ignore=True)
    each.guard.kill()
    each.guard.wait(timeout=20)
    until(lambda: not alive(each.child))


def test_a_killed_parent_ends_the_tree(tmp_path: Path) -> None:
    """The parent is a real process that is killed with -9 while its guard runs."""
    parent_code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    words = [sys.executable, "-S", "-E", "-P", str(GUARD), "--grace", "0.5", "--"]
    words += [sys.executable, "-c", TREE, str(tmp_path), "ignore", "600"]
    parent = subprocess.Popen([sys.executable, "-c", parent_code, *words], stderr=subprocess.DEVNULL)
    pids = [pid_in(tmp_path / "child"), pid_in(tmp_path / "grandchild")]
    parent.kill()
    parent.wait()
    until(lambda: not any(alive(pid) for pid in pids), 20)


def test_a_stranger_is_never_signalled(tree: Callable[..., Tree]) -> None:
    stranger = subprocess.Popen(["/bin/sleep", "600"])
    each = tree()
    each.guard.terminate()
    each.guard.wait(timeout=20)
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


def test_user_signals_reach_the_command() -> None:
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGUSR1, lambda *a: print('one', flush=True))\n"
        "signal.signal(signal.SIGUSR2, lambda *a: sys.exit(12))\n"
        "print('ready', flush=True)\n"
        "while True: signal.pause()\n"
    )
    words = [sys.executable, "-S", "-E", "-P", str(GUARD), "--", sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == "one\n"
        process.send_signal(signal.SIGUSR2)
        assert process.wait(timeout=20) == 12


def test_the_guard_starts_fast() -> None:
    run_guarded("/bin/true")
    started = time.process_time(), time.monotonic()
    for _ in range(3):
        run_guarded("/bin/true")
    assert (time.monotonic() - started[1]) / 3 < 1.0


def test_descendants_are_found_through_every_generation() -> None:
    table = {2: 1, 3: 2, 4: 3, 5: 1, 6: 99, 7: 6}
    assert sorted(guard.descendants(2, table)) == [3, 4]
    assert sorted(guard.descendants(1, table)) == [2, 3, 4, 5]
    assert guard.descendants(7, table) == []
    assert guard.descendants(8, {8: 9, 9: 8}) in ([9, 8], [9])


@pytest.mark.parametrize("orphaned", [False, True])
def test_scratch_goes_only_when_the_parent_is_gone(tmp_path: Path, orphaned: bool) -> None:
    scratch = tmp_path / "run" / "node"
    (scratch / "weights" / "v1").mkdir(parents=True)
    (scratch / "weights" / "v1" / "a").write_text("x")
    (scratch / "link").symlink_to(tmp_path)
    words = [sys.executable, "-S", "-E", "-P", str(GUARD), "--scratch", str(scratch), "--", "/bin/sleep", "600"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        until(lambda: guard.descendants(process.pid))
        assert process.stdin
        if orphaned:
            process.stdin.close()
        else:
            process.terminate()
        process.wait(timeout=20)
    assert (tmp_path / "run").exists() is not orphaned
    assert tmp_path.exists()


def test_a_daemons_directory_goes_however_it_ended(tmp_path: Path) -> None:
    local = tmp_path / "run" / "node"
    (local / "weights").mkdir(parents=True)
    words = [sys.executable, "-S", "-E", "-P", str(GUARD), "--empty", str(local), "--", "/bin/sh", "-c", "kill -9 $$"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:  # whose end is the parent's
        assert process.wait(20) == 137
    assert not (tmp_path / "run").exists()


# its first thread ends, another lives on: for the kernel a zombie, and yet its children are nobody else's
HEADLESS = """
import ctypes, subprocess, sys, threading, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
threading.Thread(target=time.sleep, args=(600,)).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_the_children_of_a_process_without_its_first_thread_are_seen() -> None:
    """Else those of a server whose threads take their time to die would outlive it."""
    with subprocess.Popen([sys.executable, "-c", HEADLESS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        state = Path(f"/proc/{process.pid}/stat")
        until(lambda: state.read_text().rpartition(")")[2].split()[0] == "Z", 20, "the first thread is gone")
        try:
            found = guard.descendants(os.getpid())
            assert process.pid in found
            (child,) = (pid for pid, parent in guard.parents().items() if parent == process.pid)
            assert child in found
            os.kill(child, signal.SIGKILL)
        finally:
            process.kill()
