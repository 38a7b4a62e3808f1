"""A server's command inside an Apptainer (Singularity) image: a pure function of the command and what it must see.

Owns the words around the command. Apptainer hands this process's environment through.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from core.inference.commands import Launch

PROGRAMS = ("apptainer", "singularity")
MOST_LINKS = 40  # of one path, as in the kernel


class NoContainerError(Exception):
    """Neither program is on this node, or what a server needs cannot be seen inside."""


@dataclass(frozen=True)
class Container:
    image: str
    program: str
    gpus: bool
    binds: tuple[str, ...]
    """Directories that are at the same place inside: model, fetched versions, compile caches."""

    def __post_init__(self) -> None:
        for path in self.binds:
            if set(path) & set(":,"):  # they part the words of --bind
                raise NoContainerError(f"{path} cannot be seen in a container: its name has a colon or a comma")


def inside(line: Launch, container: Container, *more: str) -> Launch:
    """`more`: further directories to see inside."""
    binds = [word for path in dict.fromkeys((*container.binds, *more)) for word in ("--bind", path)]
    nv = ["--nv"] if container.gpus else []
    argv = (container.program, "exec", *nv, *binds, container.image, *line.argv)
    # the home directory is seen inside, and with it packages of another Python
    return replace(line, argv=argv, env={**line.env, "PYTHONNOUSERSITE": "1"})


def directories_of(model: Path) -> list[str]:
    """The model's, itself no link, and those that its files lead to: in the hub's cache they are links.

    Inside, a link is followed by its words: each directory on the way is there under the name that the link says.
    """
    seen = [model]
    for file in model.iterdir():
        for _ in range(MOST_LINKS):
            if not file.is_symlink():
                break
            file = Path(os.path.normpath(file.parent / file.readlink()))
            seen += [file.parent, file.parent.resolve()]
    return [str(each) for each in dict.fromkeys(seen) if each.is_dir()]


def program(which: Callable[[str], str | None], image: str, programs: Iterable[str] = PROGRAMS) -> str:
    """The path of the program that runs images on this node."""
    found = next((path for path in map(which, programs) if path), None)
    if found is None:
        raise NoContainerError(
            f"{image} cannot be started: neither {' nor '.join(programs)} is on PATH of this node; load its module "
            "(slurm.inference.modules or slurm.inference.setup), or use an environment (paths.*_python) instead"
        )
    return found
