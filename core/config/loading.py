"""A file and overrides into a Config, or every problem at once."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from core.config import reading
from core.config.checks import check
from core.config.errors import ConfigError
from core.config.experiment import Config, follow
from core.config.foreign import drop_foreign
from core.config.interpolation import resolve
from core.config.messages import explain
from core.config.overrides import apply_override
from core.config.reading import Document, dotted, read_document, read_text


def to_stderr(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def load(path: Path, overrides: Sequence[str] = (), *, on_warning: Callable[[str], None] = to_stderr) -> Config:
    """Reads `path`, lays `key.sub=value` over it, resolves ${…} and checks everything.

    Raises ConfigError with one line for each problem: file:line (or the override), dotted key, what is allowed.
    """
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError([f"{path}: cannot be read: {reason}"]) from error
    return load_text(text, str(path), overrides, on_warning=on_warning)


def load_text(
    text: str, source: str, overrides: Sequence[str] = (), *, on_warning: Callable[[str], None] = to_stderr
) -> Config:
    document = read_document(text, source, Config)
    broken = not document.tree and bool(document.problems)
    for override in overrides:
        apply_override(document, override, Config)
    if broken:
        raise ConfigError(document.problems)
    tree, filled = follow(document.tree)
    failed, sources = resolve(document, tree, Config, filled)
    drop_foreign(document, tree, Config, on_warning)
    config, wrong = _validate(document, tree, failed, filled, sources)
    if config is not None:
        for at, said in check(config):
            if not any(_overlap(at, bad) or dotted(bad) in said for bad in wrong):
                document.problems.append(f"{document.where(at)}: {dotted(at)}: {said}")
    if document.problems or config is None:
        raise ConfigError(_in_order(document.problems))
    return config


def _overlap(one: reading.Path, other: reading.Path) -> bool:
    """One is the other, or holds it."""
    return one[: len(other)] == other or other[: len(one)] == one


def _validate(
    document: Document,
    tree: dict[str, Any],
    failed: set[reading.Path],
    filled: set[reading.Path],
    sources: dict[reading.Path, list[reading.Path]],
) -> tuple[Config | None, set[reading.Path]]:
    """The Config; where something is wrong, a Config of the rest, so that checks between keys still run.

    What is wrong with a key is said once, not again at those that were filled from it or that name it by ${…}.
    """
    wrong = set(failed)
    for _ in range(2):
        try:
            return Config.model_validate(tree), wrong
        except ValidationError as error:
            found = [explain(details, document, Config) for details in error.errors(include_url=False)]
            bad = wrong | {at for at, _ in found}
            for at, line in found:
                follows = any(_overlap(source, each) for source in sources.get(at, ()) for each in bad)
                if at not in wrong and at not in filled and not follows:
                    document.problems.append(line)
                wrong.add(at)
                _remove(tree, at)
    return None, wrong


def _remove(tree: Any, path: reading.Path) -> None:
    for part in path[:-1]:
        try:
            tree = tree[part]
        except (KeyError, IndexError, TypeError):
            return
    if isinstance(tree, dict):
        tree.pop(path[-1], None)


def _in_order(problems: list[str]) -> list[str]:
    """By line of the file; overrides last."""

    def key(problem: str) -> tuple[bool, int]:
        if problem.startswith("override "):
            return True, 0
        parts = problem.split(":", 2)
        return False, int(parts[1]) if len(parts) > 1 and parts[1].isdecimal() else 0

    return sorted(dict.fromkeys(problems), key=key)
