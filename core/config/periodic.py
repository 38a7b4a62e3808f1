"""Sections `saver`, `recover` and `evaluator`: what happens every so often."""

from typing import Annotated, Literal

from pydantic import Field

from core.config.base import NotBuilt, Section


class Timer(Section):
    experiment_name: str | None = None
    trial_name: str | None = None
    fileroot: str | None = None
    freq_epochs: Annotated[int, Field(ge=1)] | None = None
    freq_steps: Annotated[int, Field(ge=1)] | None = None
    freq_secs: Annotated[int, Field(ge=1)] | None = None


class Saver(Timer):
    """Checkpoints as the hub ships them."""

    mode: Annotated[Literal["auto", "sync", "async"], NotBuilt(("auto", "sync"))] = "auto"


class Evaluator(Timer):
    eval_before_train: bool = False


class Recover(Timer):
    """Checkpoints from which a run goes on."""

    mode: Literal["disabled", "on", "auto", "off"] = "disabled"
    retries: Annotated[int, Field(ge=0)] = 3
    keep: Annotated[int, Field(ge=1)] = 2  # ours
