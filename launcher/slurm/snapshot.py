"""`slurm.snapshot_code`: our packages and the user's code as they are now, in the run directory.

A job may wait for days; what is edited meanwhile must not change what it runs.
"""

from __future__ import annotations

import shutil
from importlib import metadata
from pathlib import Path

from core.config import Config
from launcher.run_dir import RunDir

REPOSITORY = Path(__file__).resolve().parents[2]
OURS = ("launcher", "core", "models", "configs")
DISTRIBUTION = "vlm-rl"
ENTRY_POINTS = "vlm_rl-0.dist-info"


def take(config: Config, run_dir: RunDir, user: Path) -> None:
    """`user`: the directory that user code is imported from (where the command was typed)."""
    fresh = run_dir.root / ".code.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(mode=0o700)
    for name in OURS:
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, fresh / name, ignore=shutil.ignore_patterns("__pycache__"))
    _write_entry_points(fresh)
    (fresh / "user").mkdir()
    for path in user_files(config, user):
        if path.is_dir():
            shutil.copytree(path, fresh / "user" / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(path, fresh / "user" / path.name)
    shutil.rmtree(run_dir.code, ignore_errors=True)
    fresh.rename(run_dir.code)


def user_files(config: Config, user: Path) -> list[Path]:
    """The top-level module or package that `reward: module:function` names, where it lies in the user's directory."""
    module, colon, _ = config.reward.partition(":")
    if not colon or module.endswith(".py"):
        return []
    top = module.split(".")[0]
    found = [user / top, user / f"{top}.py"]
    return [path for path in found if path.exists()]


def _write_entry_points(folder: Path) -> None:
    """submitit finds its plugin by the metadata beside the code."""
    points = [point for point in metadata.entry_points(group="submitit") if point.value.startswith("launcher.")]
    target = folder / ENTRY_POINTS
    target.mkdir()
    (target / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: 0\n")
    lines = ["[submitit]", *(f"{point.name} = {point.value}" for point in points)]
    (target / "entry_points.txt").write_text("\n".join(lines) + "\n")
