"""Before any server starts: is every node fit, and do they see the same run directory?

Each daemon writes what it found about its node, waits for the records of all others and judges them all the same way,
so that every node comes to the same verdict and names the same bad node. `judge` is a pure function of the records.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from core.telemetry.files import write_atomic
from launcher.run_dir import RunDir

WAIT_SECS = 180.0
POLL_SECS = 0.2
SKEW_SECS = 5.0
BUSY_MIB = 1024
OPEN_FILES = 4096
PACKAGES = ("torch", "transformers", "numpy", "pydantic", "aiohttp", "safetensors")


@dataclass(frozen=True)
class Gpu:
    name: str
    """What tells it from every other GPU of its host: its UUID, else the id that Slurm gave."""
    used_mib: int = 0


@dataclass(frozen=True)
class Record:
    node: str  # partition-index
    host: str
    gpus_wanted: int
    gpus: tuple[Gpu, ...]
    versions: dict[str, str]
    open_files: int
    memlock: int  # -1: unlimited
    clock_offset: float
    """This node's clock less the file system's, at the writing of this record."""
    problems: tuple[str, ...] = field(default=())


def directory(run_dir: RunDir, attempt: int) -> Path:
    return run_dir.logs / str(attempt) / "preflight"


def check(run_dir: RunDir, attempt: int, mine: Record, nodes: Sequence[str], wait_secs: float = WAIT_SECS) -> list[str]:
    """Writes this node's record, reads the others'; everything that is wrong, by node. The wait begins here."""
    folder = directory(run_dir, attempt)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomic(folder / f"{mine.node}.json", json.dumps(asdict(mine)))
    deadline = time.monotonic() + wait_secs
    records: dict[str, Record] = {}
    while len(records) < len(nodes) and time.monotonic() < deadline:
        for node in nodes:
            if node not in records and (found := read(folder / f"{node}.json")) is not None:
                records[node] = found
        if len(records) < len(nodes):
            time.sleep(POLL_SECS)
    return judge(list(records.values()), nodes, seen_from=f"{mine.node} ({mine.host})", waited=wait_secs)


def read(path: Path) -> Record | None:
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    found["gpus"] = tuple(Gpu(**each) for each in found["gpus"])
    return Record(**{**found, "problems": tuple(found["problems"])})


def judge(
    records: Sequence[Record], nodes: Sequence[str], *, seen_from: str = "", waited: float = WAIT_SECS
) -> list[str]:
    problems = []
    there = {record.node for record in records}
    for node in nodes:
        if node not in there:
            problems.append(
                f"{node}: its preflight record was not seen from {seen_from} within {waited:.0f} s: its task did not "
                "start, or the run directory is not the same on every node (cluster.fileroot must be shared)"
            )
    for record in records:
        problems += [f"{record.node} ({record.host}): {text}" for text in _alone(record)]
    problems += _shared_gpus(records) + _versions(records) + _clocks(records)
    return problems


def _alone(record: Record) -> list[str]:
    found = list(record.problems)
    if len(record.gpus) < record.gpus_wanted:
        names = ", ".join(gpu.name for gpu in record.gpus) or "none"
        found.append(f"{record.gpus_wanted} GPUs are planned here, {len(record.gpus)} are visible ({names})")
    for gpu in record.gpus:
        if gpu.used_mib > BUSY_MIB:
            found.append(f"GPU {gpu.name} is not free, {gpu.used_mib} MiB are in use: somebody else's process is on it")
    if 0 <= record.open_files < OPEN_FILES:
        found.append(f"only {record.open_files} files may be open (nofile), {OPEN_FILES} are needed: ask the site")
    return found


def _shared_gpus(records: Sequence[Record]) -> list[str]:
    owner: dict[tuple[str, str], str] = {}
    problems = []
    for record in records:
        for gpu in record.gpus:
            key = (record.host, gpu.name)
            if key in owner:
                problems.append(f"{record.node} ({record.host}): GPU {gpu.name} was given to {owner[key]} too")
            owner[key] = record.node
    return problems


def _versions(records: Sequence[Record]) -> list[str]:
    """Against what most nodes have."""
    problems = []
    for package in sorted({name for record in records for name in record.versions}):
        found = [record.versions.get(package, "missing") for record in records]
        usual = max(sorted(set(found)), key=found.count)
        for record, version in zip(records, found, strict=True):
            if version != usual:
                problems.append(f"{record.node} ({record.host}): {package} is {version}, elsewhere {usual}")
    return problems


def _clocks(records: Sequence[Record]) -> list[str]:
    offsets = sorted(record.clock_offset for record in records)
    middle = offsets[len(offsets) // 2] if offsets else 0.0
    return [
        f"{record.node} ({record.host}): its clock is {record.clock_offset - middle:+.0f} s off the others'"
        for record in records
        if abs(record.clock_offset - middle) > SKEW_SECS
    ]


# --- what this node is


def examine(run_dir: RunDir, node: str, planned: Sequence[int], device: str) -> Record:
    """`planned`: the plan's GPUs of this node; empty where Slurm was not asked for any and none is used."""
    gpus, problems = visible_gpus(device, planned)
    return Record(
        node=node,
        host=socket.gethostname(),
        gpus_wanted=len(planned),
        gpus=gpus,
        versions={"python": platform.python_version(), "code": code_version(), **package_versions()},
        open_files=_limit(resource.RLIMIT_NOFILE),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        clock_offset=clock_offset(run_dir.root),
        problems=tuple(problems),
    )


def _limit(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


def raise_limits() -> list[str]:
    """Soft limits up to the hard ones; what stays low, in words."""
    low = []
    for which, name, wanted in (
        (resource.RLIMIT_NOFILE, "nofile", OPEN_FILES),
        (resource.RLIMIT_MEMLOCK, "memlock", resource.RLIM_INFINITY),
    ):
        soft, hard = resource.getrlimit(which)
        if soft != hard:
            resource.setrlimit(which, (hard, hard))
        if hard != resource.RLIM_INFINITY and (wanted == resource.RLIM_INFINITY or hard < wanted):
            low.append(f"{name} is {hard}, {'unlimited' if wanted == resource.RLIM_INFINITY else wanted} is better")
    return low


def clock_offset(folder: Path) -> float:
    """Against the file system's clock: the server's where it stamps files itself (NFS)."""
    probe = folder / f".clock-{os.getpid()}-{socket.gethostname()}"
    before = time.time()
    probe.write_bytes(b"x")
    after = time.time()
    stamp = probe.stat().st_mtime
    probe.unlink()
    return (before + after) / 2 - stamp


def visible_gpus(device: str, planned: Sequence[int]) -> tuple[tuple[Gpu, ...], list[str]]:
    """Those that Slurm gave; where it was not asked (gpu_form: none), those of the plan."""
    given = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each not in ("", "-1")]
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        given = [str(gpu) for gpu in planned]
    physical = os.environ.get("SLURM_STEP_GPUS", "").split(",")
    named = physical if len(physical) == len(given) and physical != [""] else given
    if device != "cuda":
        return tuple(Gpu(each) for each in named), []
    words = ["nvidia-smi", "--query-gpu=index,uuid,memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return tuple(Gpu(each) for each in named), [f"nvidia-smi cannot be run: {error}"]
    if done.returncode:
        return tuple(Gpu(each) for each in named), [f"nvidia-smi failed: {(done.stderr or done.stdout).strip()[-200:]}"]
    return parse_smi(done.stdout, given), []


def parse_smi(text: str, given: Sequence[str]) -> tuple[Gpu, ...]:
    """Those of nvidia-smi's rows that CUDA_VISIBLE_DEVICES allows (all when it says nothing)."""
    rows = [[word.strip() for word in line.split(",")] for line in text.splitlines() if line.count(",") == 2]
    chosen = [row for row in rows if not given or row[0] in given or any(row[1].startswith(each) for each in given)]
    return tuple(Gpu(uuid, int(used)) for _, uuid, used in chosen)


def package_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return found


def code_version() -> str:
    """Of our own sources: their names and sizes and times tell two checkouts apart."""
    root = Path(__file__).resolve().parents[2]
    sizes = [(str(path.relative_to(root)), path.stat().st_size) for top in ("launcher", "core", "models")
             for path in sorted((root / top).rglob("*.py"))]  # fmt: skip
    return f"{sum(size for _, size in sizes)} bytes in {len(sizes)} files"
