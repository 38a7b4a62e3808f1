"""Why a configuration cannot run: one Problem for each cause, all of them in one PlanError."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from core.config.errors import UserError


@dataclass(frozen=True)
class Problem:
    """`layout`: another allocation, cluster or batch size would cure it, so layouts that fit are looked for.

    `place`: the key at whose line it is shown, where that is not `key` (which may not be written anywhere).
    """

    key: str
    message: str
    pointer: str = ""
    layout: bool = False
    place: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" + (f"\n{self.pointer}" if self.pointer else "")


class PlanError(UserError):
    """Everything that is wrong at once; `fits` are changes that were planned and have no layout problem."""

    def __init__(self, problems: Sequence[Problem], fits: Sequence[str] = (), where: str = "") -> None:
        self.problems = list(problems)
        self.fits = list(fits)
        prefix = f"{where}: " if where else ""
        text = "\n".join(f"{prefix}{problem}" for problem in self.problems)
        if self.fits:
            text += "\n  fits: " + ", or ".join(self.fits)
        super().__init__(text)
