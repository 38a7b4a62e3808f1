"""Starts and stops the processes of a test cluster; each is ended by the pid that it wrote itself."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO, TypeVar

import psutil

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
        self.mark = f"# vlm-rl test cluster {shape.prefix}"
        self.namespaces = Namespaces("vlmrl", shape.subnet, shape.nodes)

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
        self._take_this_machine()
        self._directories()
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
        until(self._all_idle, 90, "every node idle")
        return self

    def _take_this_machine(self) -> None:
        """Ports, host names and namespaces are fixed: one cluster of a prefix at a time."""
        lock = Path(f"/run/lock/vlm-rl-cluster-{self.shape.prefix}").open("w")  # noqa: SIM115 -- held until stop
        until(lambda: _locked(lock), LOCK_SECS, "another test cluster of this machine ends", poll=0.5)
        self._lock = lock

    def take_over(self) -> None:
        """A cluster that another process started, and left."""
        self._take_this_machine()

    def start_node(self, index: int) -> None:
        name = self.shape.names[index - 1]
        (self.root / "spool" / name).mkdir(parents=True, exist_ok=True)
        inner = ["unshare", "--uts", "sh", "-c", f"hostname {name} && exec slurmd -N {name}"]
        outer = self.namespaces.inside(index) if self.shape.netns else []
        self._spawn([*outer, *inner])

    def kill_node(self, index: int) -> None:
        """slurmd dies, and whatever it runs with it, as when the machine loses power."""
        name = self.shape.names[index - 1]
        path = self.root / "run" / f"slurmd-{name}.pid"
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(path.read_text()), signal.SIGKILL)
        path.unlink(missing_ok=True)
        for process in self.processes_on(index):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def processes_on(self, index: int) -> list[psutil.Process]:
        """Everything in the node's UTS namespace that is no daemon of the cluster."""
        name = self.shape.names[index - 1]
        found = []
        for process in psutil.process_iter(["name"]):
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get("SLURMD_NODENAME") == name and process.info["name"] != "slurmd":
                    found.append(process)
        return found

    def _all_idle(self) -> bool:
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
        # in place: the file may be a mount of its own
        lines = [line for line in HOSTS.read_text().splitlines() if self.mark not in line]
        lines += [f"{self.shape.address(index)} {name} {self.mark}" for index, name in enumerate(self.shape.names, 1)]
        HOSTS.write_text("\n".join(lines) + "\n")

    def _accounting(self) -> None:
        data, sock = self.root / "mysql", self.root / "mysql" / "sock"
        data.mkdir(exist_ok=True)
        shutil.chown(data, "mysql")
        self._spawn(["mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={data}",
                     "--auth-root-authentication-method=normal", "--skip-test-db"])  # fmt: skip
        log = (self.root / "log" / "mariadb.log").open("ab")
        words = ["mariadbd", "--no-defaults", "--user=mysql", f"--datadir={data}", f"--socket={sock}",
                 "--bind-address=127.0.0.1", f"--port={self.shape.sql_port}", "--innodb-buffer-pool-size=64M",
                 "--innodb-flush-log-at-trx-commit=0"]  # fmt: skip
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
        for path in [*pids.glob("slurmd-*.pid"), *(pids / f"{name}.pid" for name in
                     ("slurmctld", "slurmdbd", "mariadbd", "munged"))]:  # fmt: skip
            if path.exists():
                _end(int(path.read_text()))
                path.unlink(missing_ok=True)
        HOSTS.write_text("".join(line + "\n" for line in HOSTS.read_text().splitlines() if self.mark not in line))
        if self.shape.netns:
            self.namespaces.remove()
        shutil.rmtree(self.root, ignore_errors=True)
        self._lock.close()
        self._lock = None


def make(root: Path, **changes: object) -> Cluster:
    return Cluster(Shape(root, socket.gethostname(), **changes))  # type: ignore[arg-type]


def _locked(file: TextIO) -> bool:
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
        return True
    return False


def _end(pid: int) -> None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
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
