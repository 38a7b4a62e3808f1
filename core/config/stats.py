"""Sections `stats_logger` and `perf_tracer`: where numbers of a run go besides its metrics.jsonl."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from core.config.base import Foreign, NotBuilt, Section


class WandB(Section):
    mode: Annotated[Literal["disabled", "online", "offline", "shared"], NotBuilt()] = "disabled"
    wandb_base_url: str = ""
    wandb_api_key: str = Field(default="", repr=False)
    entity: str | None = None
    project: str | None = None
    name: str | None = None
    job_type: str | None = None
    group: str | None = None
    notes: str | None = None
    tags: tuple[str, ...] | None = None
    config: dict[str, Any] | None = None
    id_suffix: str | None = "train"


class Swanlab(Section):
    project: str | None = None
    name: str | None = None
    config: dict[str, Any] | None = None
    logdir: str | None = None
    mode: Annotated[Literal["disabled", "cloud", "local", "offline"] | None, NotBuilt(("disabled", None))] = "disabled"
    api_key: str | None = Field(default=None, repr=False)


class TensorBoard(Section):
    path: str | None = None  # null = tb/ of the run directory


class StatsLogger(Section):
    experiment_name: str | None = None
    trial_name: str | None = None
    fileroot: str | None = None
    wandb: WandB = WandB()
    swanlab: Swanlab = Swanlab()
    tensorboard: TensorBoard = TensorBoard()

    foreign: ClassVar[dict[str, Foreign]] = {"trackio": Foreign({"mode": "disabled"})}


class SessionTracer(Section):
    enabled: Annotated[bool, NotBuilt()] = False
    flush_threshold: Annotated[int, Field(ge=1)] = 256


class PerfTracer(Section):
    experiment_name: str | None = None
    trial_name: str | None = None
    fileroot: str | None = None
    enabled: Annotated[bool, NotBuilt()] = False
    save_interval: Annotated[int, Field(ge=1)] = 1
    profile_steps: tuple[int, ...] | None = None
    session_tracer: SessionTracer | None = None
