"""What the pages tell a reader to type works: plan is run, Python blocks are called, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from core.config import load
from tests.support.runs import ROOT, launcher

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def planned() -> list[tuple[str, int]]:
    return [(command.split("#")[0].strip(), 2 if "exit status 2" in command else 0) for command in typed("plan")]


def typed(name: str) -> list[str]:
    lines = [line for page in PAGES for block in blocks(page, "console") for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in lines if line.startswith(f"$ python -m launcher {name} ")]


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which nothing has run yet but the page's own make-model."""
    clone = tmp_path_factory.mktemp("clone")
    (clone / "configs").symlink_to(ROOT / "configs")
    [made] = typed("make-model")
    launcher(*shlex.split(made, comments=True)[3:], cwd=clone).expect()
    return clone


@pytest.mark.parametrize(("command", "status"), planned())
def test_plan_commands_do_what_the_page_says(command: str, status: int, fresh: Path) -> None:
    launcher(*shlex.split(command)[3:], cwd=fresh).expect(status)


def test_the_example_of_the_help_runs_on_a_fresh_clone(tmp_path: Path) -> None:
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    [example] = re.findall(r"^example: (.*)", launcher("--help").expect().out, re.MULTILINE)
    launcher(*shlex.split(example)[3:], f"paths.cache={tmp_path / 'cache'}", cwd=tmp_path).expect()


def test_the_example_of_the_readme_is_planned_and_is_grpo(tmp_path: Path) -> None:
    [text] = blocks(ROOT / "README.md", "yaml")
    (tmp_path / "example.yaml").write_text(text)
    launcher("plan", str(tmp_path / "example.yaml"), f"paths.cache={tmp_path / 'cache'}").expect()
    config = load(tmp_path / "example.yaml", [])
    norm = config.actor.reward_norm
    assert norm is not None and norm.mean_level == "group" and norm.group_size == config.gconfig.n_samples > 1


def test_the_reward_of_the_page_is_one() -> None:
    namespace: dict = {}
    for block in blocks(ROOT / "docs" / "config.md", "python"):
        exec(block, namespace)
    assert namespace["score"]("p", "it is 5", [1], [2], answer="5", other="x") == 1.0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_every_command_of_the_readme_exists() -> None:
    named = set(re.findall(r"^\| `([a-z-]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    listed = set(re.findall(r"^  ([a-z-]+) ", launcher("--help").expect().out, re.MULTILINE))
    assert named and named <= listed
