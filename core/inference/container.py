"""A server's command inside an Apptainer (Singularity) image: a pure function of the command and what it must see.

Owns the words around the command. Its environment needs none: Apptainer hands this process's through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from core.inference.commands import Launch

PROGRAMS = ("apptainer", "singularity")


class NoContainerError(Exception):
    """Neither program is on this node."""


@dataclass(frozen=True)
class Container:
    image: str
    program: str
    gpus: bool
    binds: tuple[str, ...]
    """Directories that are at the same place inside: model, fetched versions, compile caches."""


def inside(line: Launch, container: Container, *more: str) -> Launch:
    """`more`: further directories to see inside."""
    binds = [word for path in dict.fromkeys((*container.binds, *more)) for word in ("--bind", path)]
    nv = ["--nv"] if container.gpus else []
    return replace(line, argv=(container.program, "exec", *nv, *binds, container.image, *line.argv))


def directories_of(model: Path) -> list[str]:
    """The model's, and those that its files lead to: in the hub's cache they are links."""
    led_to = {str(each.resolve().parent) for each in model.iterdir() if each.is_symlink()}
    return [str(model), *sorted(led_to - {str(model)})]


def program(which: Callable[[str], str | None], image: str, programs: Iterable[str] = PROGRAMS) -> str:
    """The path of the program that runs images on this node."""
    found = next((path for path in map(which, programs) if path), None)
    if found is None:
        raise NoContainerError(
            f"{image} cannot be started: neither {' nor '.join(programs)} is on PATH of this node; load its module "
            "(slurm.inference.modules or slurm.inference.setup), or use an environment (paths.*_python) instead"
        )
    return found
