"""The run directory: modes, the token, and that creating it twice changes nothing."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from launcher.run_dir import RunDir, RunDirError, run_dir_of


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_user_may_read_it(tmp_path: Path) -> None:
    run = run_dir_of(tmp_path, "experiment", "trial")
    before = os.umask(0)
    try:
        run.create()
    finally:
        os.umask(before)
    assert run.root == tmp_path / "experiment" / "trial"
    assert mode(run.root) == 0o700 and mode(run.token) == 0o600
    assert len(bytes.fromhex(run.read_token())) == 32


def test_creating_it_again_keeps_the_token(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    token = run.read_token()
    run.token.chmod(0o644)
    run.create()
    assert run.read_token() == token and mode(run.token) == 0o600


def test_a_log_has_a_directory_for_each_attempt_and_node(tmp_path: Path) -> None:
    path = RunDir(tmp_path).log(3, "training", 1, "rank-4")
    assert path == tmp_path / "logs" / "3" / "training-1" / "rank-4.log"
    assert path.parent.is_dir()


def test_a_root_that_cannot_be_made_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError, match=r"cluster\.fileroot"):
        RunDir(tmp_path / "file" / "run").create()
    with pytest.raises(RunDirError, match=r"is .* a run directory"):
        RunDir(tmp_path / "nowhere").read_token()
