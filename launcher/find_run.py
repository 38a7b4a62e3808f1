"""RUN on the command line: a run directory, or experiment/trial below ./runs or AReaL's default fileroot."""

import difflib
from pathlib import Path

from launcher.run_dir import RunDir, RunDirError

ROOTS = (Path("runs"), Path("/tmp/areal"))


def find_run(text: str) -> RunDir:
    """The run that `text` names. Raises RunDirError with the nearest one when there is none."""
    candidates = [Path(text).expanduser(), *(root / text for root in ROOTS if text.count("/") == 1)]
    for path in candidates:
        if (path / "config.yaml").is_file():
            return RunDir(path.absolute())
    known = sorted(
        f"{config.parent.parent.name}/{config.parent.name}" for root in ROOTS for config in root.glob("*/*/config.yaml")
    )
    near = difflib.get_close_matches(text.strip("/"), known, n=3, cutoff=0.3) or known[-3:]
    looked = ", ".join(str(path) for path in candidates)
    hint = f"\n  there is: {', '.join(near)}" if near else "\n  there is no run below ./runs yet"
    hint += "\n  of a run in another cluster.fileroot give the directory: FILEROOT/experiment/trial"
    raise RunDirError(f"no run {text!r}: looked for config.yaml in {looked}{hint}")
