"""Starts and stops the processes of a test cluster; each is ended by the pid that it wrote itself."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import shlex
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TextIO, TypeVar

import psutil

from tests.support.slurm_cluster import slots
from tests.support.slurm_cluster.configuration import Shape, gres_conf, slurm_conf, slurmdbd_conf
from tests.support.slurm_cluster.namespaces import Namespaces

LOCK_SECS = 120.0
HOSTS = Path("/etc/hosts")
Found = TypeVar("Found")


def until(condition: Callable[[], Found], seconds: float, what: str, poll: float = 0.1) -> Found:
    """The first true value; a deadline names what did not come."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(poll)
    raise AssertionError(f"{what}: not within {seconds:g} s")


class Cluster:
    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.root = shape.root
        self._lock: TextIO | None = None

    @property
    def mark(self) -> str:
        return f"# vlm-rl test cluster {self.shape.slot}"

    @property
    def namespaces(self) -> Namespaces:
        return Namespaces(f"vlmrl{self.shape.slot}", self.shape.subnet, self.shape.nodes)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.root / "conf" / "slurm.conf")}

    def call(self, *words: str, check: bool = True, timeout: float = 30) -> str:
        """One Slurm command, under a timeout."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=timeout, check=False)
        if check and done.returncode:
            raise AssertionError(f"{' '.join(words)}: exit {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    # --- start

    def start(self) -> Cluster:
        self._take_a_slot()
        self._directories()
        (self.root / "slot").write_text(str(self.shape.slot))
        sock = self.root / "munge" / "sock"
        self._spawn(
            ["munged", f"--key-file={self.root}/munge/key", f"--socket={sock}", f"--seed-file={self.root}/munge/seed",
             f"--pid-file={self.root}/run/munged.pid", f"--log-file={self.root}/munge/log", "--num-threads=4"]
        )  # fmt: skip
        self._write_hosts()
        if self.shape.netns:
            self.namespaces.make()
        if self.shape.accounting:
            self._accounting()
        self._spawn(["slurmctld"])
        for index in range(1, self.shape.nodes + 1):
            self.start_node(index)
        until(self.all_idle, 90, "every node idle")
        return self

    def _take_a_slot(self) -> None:
        """Two clusters at once, of one test session or of several, have nothing in common."""
        slot, self._lock = until(lambda: slots.take("cluster"), LOCK_SECS, "one of this machine's test clusters ends")
        self.shape = dataclasses.replace(self.shape, slot=slot)
        left = slots.last_root(self._lock)
        if left is not None:
            end_daemons(left)
        slots.note_root(self._lock, self.root)

    def hand_over(self) -> None:
        """It lives on after this process: another keeps its slot."""
        assert self._lock is not None
        (self.root / "run" / "sleep.pid").write_text(str(slots.keep_held(self._lock)))

    def take_over(self) -> None:
        """A cluster that another process started and handed over."""
        self.shape = dataclasses.replace(self.shape, slot=int((self.root / "slot").read_text()))
        path = self.root / "run" / "sleep.pid"
        _end(int(path.read_text()), "sleep")
        path.unlink()
        self._lock = until(lambda: slots.lock("cluster", self.shape.slot), 10, "its slot")

    def start_node(self, index: int, *, mounts: Sequence[tuple[Path, Path]] = ()) -> None:
        """`mounts`: (what, where) pairs that are mounted on this node only."""
        name = self.shape.names[index - 1]
        (self.root / "spool" / name).mkdir(parents=True, exist_ok=True)
        words = [f"mount --bind {shlex.quote(str(what))} {shlex.quote(str(where))} &&" for what, where in mounts]
        script = " ".join([*words, f"hostname {name} && exec slurmd -N {name}"])
        outer: list[str] = []
        if self.shape.netns:
            self.namespaces.plug(index)
            outer = self.namespaces.inside(index)
        self._spawn([*outer, "unshare", "--uts", *(["--mount"] if mounts else []), "sh", "-c", script])

    @contextlib.contextmanager
    def drained(self, numbers: str) -> Iterator[None]:
        """Nothing new starts on these nodes ("1-4") meanwhile."""
        name = f"NodeName={self.shape.nodes_of(numbers)}"
        self.call("scontrol", "update", name, "State=DRAIN", "Reason=test")
        try:
            yield
        finally:
            self.call("scontrol", "update", name, "State=RESUME")

    def notice_lost_node(self, index: int) -> None:
        """What slurmctld does by itself after SlurmdTimeout."""
        name = f"NodeName={self.shape.names[index - 1]}"
        self.call("scontrol", "update", name, "State=DOWN", "Reason=lost")

    def stop_node(self, index: int) -> None:
        path = self.root / "run" / f"slurmd-{self.shape.names[index - 1]}.pid"
        _end(int(path.read_text()), "slurmd")
        path.unlink(missing_ok=True)

    def kill_node(self, index: int) -> None:
        """slurmd dies, whatever it runs with it, and nobody answers for them, as when the machine loses power."""
        name = self.shape.names[index - 1]
        if self.shape.netns:
            self.namespaces.unplug(index)
        path = self.root / "run" / f"slurmd-{name}.pid"
        for process in self._processes_beside(int(path.read_text())):
            with contextlib.suppress(psutil.Error):
                process.kill()
        path.unlink(missing_ok=True)

    @staticmethod
    def _processes_beside(pid: int) -> list[psutil.Process]:
        """Everything in the UTS namespace of a slurmd, itself and its slurmstepds too."""
        space = Path(f"/proc/{pid}/ns/uts").readlink()
        assert space != Path("/proc/self/ns/uts").readlink(), "that would be this whole machine"
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if Path(f"/proc/{process.pid}/ns/uts").readlink() == space:
                    found.append(process)
        return found

    def all_idle(self) -> bool:
        states = self.call("sinfo", "-h", "-N", "-p", "main", "-o", "%T", check=False).split()
        return len(states) == self.shape.nodes and set(states) == {"idle"}

    def _spawn(self, words: Sequence[str]) -> None:
        done = subprocess.run(
            list(words), env=self.environment, stdin=subprocess.DEVNULL, timeout=60, check=False,
            stdout=(self.root / "log" / "spawn.log").open("ab"), stderr=subprocess.STDOUT,
        )  # fmt: skip
        if done.returncode:
            log = (self.root / "log" / "spawn.log").read_text()[-2000:]
            raise AssertionError(f"{words[0]}: exit {done.returncode}\n{log}")

    def _directories(self) -> None:
        for name in ("conf", "state", "log", "munge", "dev", "spool", "run"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        for path in (self.root, self.root / "munge", self.root / "conf"):
            path.chmod(0o755)
        for index in range(self.shape.gpus):
            device = self.root / "dev" / f"nvidia{index}"
            if not device.exists():
                os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        key = self.root / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        conf = self.root / "conf"
        (conf / "slurm.conf").write_text(slurm_conf(self.shape))
        (conf / "gres.conf").write_text(gres_conf(self.shape))

    def _write_hosts(self) -> None:
        """In place: the file may be a mount of its own."""
        mine = [f"{self.shape.address(index)} {name} {self.mark}" for index, name in enumerate(self.shape.names, 1)]
        with _hosts_locked():
            HOSTS.write_text("".join(f"{line}\n" for line in [*self._other_hosts(), *mine]))

    def _forget_hosts(self) -> None:
        with _hosts_locked():
            HOSTS.write_text("".join(f"{line}\n" for line in self._other_hosts()))

    def _other_hosts(self) -> list[str]:
        return [line for line in HOSTS.read_text().splitlines() if self.mark not in line]

    def _accounting(self) -> None:
        data, sock = self.root / "mysql", self.root / "mysql" / "sock"
        scratch = self.root / "mysql-tmp"  # in a common /tmp each server removes the others' temporary tables
        for path in (data, scratch):
            path.mkdir(exist_ok=True)
            shutil.chown(path, "mysql")
        self._spawn(["mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={data}", f"--tmpdir={scratch}",
                     "--auth-root-authentication-method=normal", "--skip-test-db"])  # fmt: skip
        log = (self.root / "log" / "mariadb.log").open("ab")
        words = ["mariadbd", "--no-defaults", "--user=mysql", f"--datadir={data}", f"--tmpdir={scratch}",
                 f"--socket={sock}", "--bind-address=127.0.0.1", f"--port={self.shape.sql_port}",
                 "--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0"]  # fmt: skip
        database = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        (self.root / "run" / "mariadbd.pid").write_text(str(database.pid))
        admin = ["mariadb", "--no-defaults", "-S", str(sock), "-uroot"]
        grants = ";".join(
            ["create database if not exists slurm_acct_db"]
            + [f"create user if not exists slurm@'{host}' identified by 'slurm'" for host in ("127.0.0.1", "localhost")]
            + [f"grant all on slurm_acct_db.* to slurm@'{host}'" for host in ("127.0.0.1", "localhost")]
        )
        until(
            lambda: subprocess.run([*admin, "-e", grants], capture_output=True, check=False).returncode == 0,
            60,
            "database",
        )
        conf = self.root / "conf" / "slurmdbd.conf"
        conf.write_text(slurmdbd_conf(self.shape))
        conf.chmod(0o600)
        self._spawn(["slurmdbd"])
        until(lambda: _listens(self.shape.dbd_port), 30, "slurmdbd")
        self.call("sacctmgr", "-i", "add", "cluster", "fake", check=False)

    # --- end

    def stop(self) -> None:
        if self._lock is None:  # it never had the machine: what is there is another's
            return
        pids = self.root / "run"
        if (pids / "slurmctld.pid").exists():
            with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
                self.call("scancel", "--user=root", check=False, timeout=10)
                until(lambda: not self.call("squeue", "-h", check=False, timeout=10), 30, "queue empty")
        end_daemons(self.root)
        self._forget_hosts()
        self.namespaces.remove()
        shutil.rmtree(self.root, ignore_errors=True)
        slots.note_root(self._lock, None)
        self._lock.close()
        self._lock = None


def make(root: Path, **changes: object) -> Cluster:
    return Cluster(Shape(root, socket.gethostname(), **changes))  # type: ignore[arg-type]


@contextlib.contextmanager
def _hosts_locked() -> Iterator[None]:
    with Path("/run/lock/vlm-rl-hosts").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
        return True
    return False


def end_daemons(root: Path) -> None:
    """Those of the cluster in `root`, by the pids that they wrote: nodes first, then what they need."""
    names = ("slurmctld", "slurmdbd", "mariadbd", "munged")
    for path in [*(root / "run").glob("slurmd-*.pid"), *(root / "run" / f"{name}.pid" for name in names)]:
        if path.exists():
            _end(int(path.read_text()), path.stem.partition("-")[0])
            path.unlink(missing_ok=True)


def _end(pid: int, name: str) -> None:
    """Unless the pid is another's by now."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if process.name() != name:
            return
        process.terminate()
        gone = until_dead(process, 10)
        if not gone:
            process.kill()
            until_dead(process, 5)


def until_dead(process: psutil.Process, seconds: float) -> bool:
    """A zombie that nobody reaps counts as dead."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.05)
                continue
        return True
    return False
