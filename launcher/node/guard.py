"""Runs one command and answers for its whole tree: `python -S -E -P guard.py [OPTIONS] -- COMMAND…`.

The guard is the subreaper of everything the command starts. At EOF of its standard input (its parent is gone), at
SIGTERM, or when the command ends, it ends what is left of the tree: TERM to the command, after `grace` seconds KILL to
all; what outlives the command gets TERM and after `final` seconds KILL. A second SIGTERM kills at once. SIGUSR1 and
SIGUSR2 are passed on to the command. The exit status is the command's (128 + n when signal n ended it).
When the parent is gone, nobody else can empty the node-local directory `scratch`: the guard does. `empty` goes in any
case: it is what a daemon that was killed could not take away itself.
Only descendants are ever signalled, through pidfds, so that a re-used pid cannot be hit. Stdlib only: it starts in
milliseconds and stays small.
"""

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL = 0.02
NOT_STARTED = 127
UNKILLABLE = 30.0
RESET = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD, signal.SIGPIPE)


def become_subreaper() -> None:
    """Orphans below this process become its children instead of init's."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


def parents() -> dict[int, int]:
    """Parent pid of every live process that this one can see. Zombies are left out, but for one whose first thread has
    ended before its others: until they have, its children are its own.
    """
    found = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208 -- pathlib costs a tenth of the start
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            with open(f"/proc/{entry}/stat", "rb") as file:  # noqa: PTH123
                fields = file.read().rpartition(b")")[2].split()
            state, parent, threads = fields[0], fields[1], fields[17]
            if state not in (b"Z", b"X") or int(threads) > 1:
                found[int(entry)] = int(parent)
    return found


def descendants(root: int, parent_of: dict[int, int] | None = None) -> list[int]:
    """Live processes below `root`."""
    table = parents() if parent_of is None else parent_of
    children: dict[int, list[int]] = {}
    for pid, parent in table.items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    todo = list(children.get(root, ()))
    while todo:
        pid = todo.pop()
        if pid not in found:
            found.append(pid)
            todo += children.get(pid, ())
    return found


def signal_descendants(number: int, *, spare: Callable[[int], bool] = lambda pid: False) -> int:
    """Sends `number` to every descendant of this process but the spared ones; returns how many there were."""
    opened = []
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            opened.append((pid, os.pidfd_open(pid)))
    still_ours = set(
        descendants(os.getpid())
    )  # a pid that was re-used before its pidfd was opened is no longer below us
    count = 0
    for pid, handle in opened:
        with contextlib.suppress(OSError):
            if pid in still_ours and not spare(pid):
                signal.pidfd_send_signal(handle, number)
                count += 1
        os.close(handle)
    return count


def reap(*, but: int | None = None) -> None:
    """Collects every dead child (adopted ones included), except that the status of `but` is left for its owner."""
    while True:
        try:
            dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if dead is None or dead.si_pid == but:
            return
        with contextlib.suppress(ChildProcessError):
            os.waitpid(dead.si_pid, os.WNOHANG)


def remove_tree(root: str) -> None:
    """shutil.rmtree would triple the time of the start."""
    for folder, folders, files in os.walk(root, topdown=False):
        for name in [*files, *folders]:
            path = f"{folder}/{name}"
            with contextlib.suppress(OSError):
                if name in files or os.path.islink(path):  # noqa: PTH114
                    os.unlink(path)  # noqa: PTH108
                else:
                    os.rmdir(path)  # noqa: PTH106
    above = os.path.dirname(root)  # noqa: PTH120
    with contextlib.suppress(OSError):  # launcher.node.agreed's links, once they lead nowhere
        for name in os.listdir(f"{above}/served"):  # noqa: PTH208
            if not os.path.exists(f"{above}/served/{name}"):  # noqa: PTH110
                os.unlink(f"{above}/served/{name}")  # noqa: PTH108
    for path in (root, f"{above}/served", above):  # the run's directory goes with its last node's
        with contextlib.suppress(OSError):
            os.rmdir(path)  # noqa: PTH106


class Guard:
    """One command from start to the end of its tree."""

    def __init__(self, command: list[str], grace: float, final: float, scratch: str = "", empty: str = "") -> None:
        self.command = command
        self.grace = grace
        self.final = final
        self.scratch = scratch
        self.empty = empty
        self.orphaned = False
        self.child = 0
        self.status: int | None = None
        self.asked = 0
        self.deadline: float | None = None

    def run(self) -> int:
        become_subreaper()
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        os.set_blocking(wake_read, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, lambda number, frame: self.stop("asked to stop"))
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, frame: self.pass_on(number))
        self.child = self.start()
        if self.asked:  # TERM came while the command was being started
            self.pass_on(signal.SIGTERM)
        watched = [wake_read, 0]
        while not self.ended():
            wait = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
            ready = select.select(watched, [], [], wait)[0]
            if wake_read in ready:
                os.read(wake_read, 4096)
            if 0 in ready and not os.read(0, 4096):
                watched.remove(0)
                self.orphaned = True
                self.stop("the parent is gone")
            if self.deadline is not None and time.monotonic() >= self.deadline:
                self.say(f"not gone after {self.grace:g} s, killed")
                self.kill()
        self.end_rest()
        for place in (self.scratch if self.orphaned else "", self.empty):
            if place:
                remove_tree(place)
        assert self.status is not None
        return self.status

    def start(self) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            # a guard that is itself killed takes the command with it
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(NOT_STARTED)
            signal.set_wakeup_fd(-1)
            for number in RESET:
                signal.signal(number, signal.SIG_DFL)
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            os.execvp(self.command[0], self.command)
        except OSError as error:
            os.write(2, f"guard: {self.command[0]} cannot be started: {error.strerror}\n".encode())
        os._exit(NOT_STARTED)

    def stop(self, why: str) -> None:
        self.asked += 1
        if self.asked == 1:
            self.say(f"{why}, TERM to the command")
            self.pass_on(signal.SIGTERM)
            self.pass_on(signal.SIGCONT)  # one that is stopped would not hear it
            self.deadline = time.monotonic() + self.grace
        else:
            self.kill()

    def pass_on(self, number: int) -> None:
        if self.child and self.status is None:  # not reaped yet, so the pid is still the command's
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child, number)

    def kill(self) -> None:
        self.deadline = time.monotonic() + self.grace
        signal_descendants(signal.SIGKILL)

    def ended(self) -> bool:
        """True once the command is dead; orphans that died are collected on the way."""
        if not self.child:
            return False
        reap(but=self.child)
        pid, status = os.waitpid(self.child, os.WNOHANG)
        if pid == 0:
            return False
        code = os.waitstatus_to_exitcode(status)
        self.status = code if code >= 0 else 128 - code
        return True

    def end_rest(self) -> None:
        """The command is dead: TERM, then KILL, until nothing is left below."""
        started = time.monotonic()
        number = signal.SIGTERM if self.asked < 2 else signal.SIGKILL
        while signal_descendants(number):
            patience = self.final if number == signal.SIGTERM else POLL
            until = time.monotonic() + patience
            while descendants(os.getpid()) and time.monotonic() < until and self.asked < 2:
                time.sleep(POLL / 2)
                reap()
            reap()
            number = signal.SIGKILL
            if time.monotonic() - started > self.final + UNKILLABLE:
                self.say(f"cannot be killed, left behind: {descendants(os.getpid())}")
                return
        reap()

    def say(self, text: str) -> None:
        stamp = time.strftime("%H:%M:%S")
        with contextlib.suppress(OSError):
            os.write(2, f"{stamp} guard of {self.command[0]} ({self.child}): {text}\n".encode())


def main(argv: list[str]) -> int:
    options = {"--grace": "15", "--final": "2", "--scratch": "", "--empty": ""}
    position = 0
    while position + 1 < len(argv) and argv[position] in options:
        options[argv[position]] = argv[position + 1]
        position += 2
    if argv[position : position + 1] != ["--"] or not argv[position + 1 :]:
        sys.stderr.write("usage: guard.py [--grace SECONDS] [--final SECONDS] [--scratch DIR] [--empty DIR] -- …\n")
        return 2
    command = argv[position + 1 :]
    seconds = float(options["--grace"]), float(options["--final"])
    return Guard(command, *seconds, options["--scratch"], options["--empty"]).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
