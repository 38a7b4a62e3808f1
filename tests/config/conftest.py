"""Small configuration files for tests of loading."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from core.config import Config, ConfigError, load

MINIMAL = """\
experiment_name: exp
trial_name: t0
allocation_mode: embedded:d1+archon:d1
train_dataset:
  path: rows
actor:
  path: model
"""


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Config]:
    """Loads MINIMAL with text behind it."""

    def read_text(text: str = "", overrides: Sequence[str] = (), *, minimal: str = MINIMAL) -> Config:
        path = tmp_path / "mine.yaml"
        path.write_text(minimal + text)
        return load(path, overrides, on_warning=lambda line: None)

    return read_text


@pytest.fixture
def problems(read: Callable[..., Config], tmp_path: Path) -> Callable[..., list[str]]:
    """The problems of such a file, without the directory in front of its name."""

    def find(text: str = "", overrides: Sequence[str] = (), *, minimal: str = MINIMAL) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            read(text, overrides, minimal=minimal)
        return [line.replace(f"{tmp_path}/", "") for line in caught.value.problems]

    return find
