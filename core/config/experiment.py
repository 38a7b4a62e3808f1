"""The whole configuration: the top level and the defaults that follow from other keys."""

from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, model_validator

from core.config.actor import Actor, Critic
from core.config.base import NotBuilt, Section
from core.config.cluster import Cluster, Paths, Scheduler, WeightSync
from core.config.dataset import TrainDataset, ValidDataset
from core.config.deadlines import Deadlines
from core.config.generation import Generation
from core.config.periodic import Evaluator, Recover, Saver
from core.config.rollout import Embedded, Rollout
from core.config.servers import SGLang, Vllm
from core.config.slurm import Slurm
from core.config.stats import PerfTracer, StatsLogger

# (a key that is not written, the key whose value it then takes)
FOLLOWS = (
    (("actor", "temperature"), ("gconfig", "temperature")),
    (("actor", "max_new_tokens"), ("gconfig", "max_new_tokens")),
    (("rollout", "consumer_batch_size"), ("train_dataset", "batch_size")),
    (("ref", "path"), ("actor", "path")),
    (("ref", "temperature"), ("actor", "temperature")),
    (("tokenizer_path",), ("actor", "path")),
    (("rollout", "tokenizer_path"), ("tokenizer_path",)),
    (("train_dataset", "type"), ("type",)),
    (("valid_dataset", "type"), ("type",)),
)


class Config(Section):
    experiment_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    trial_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    type: Literal["rl", "sft"] = "rl"  # ours
    seed: Annotated[int, Field(ge=0)] = 1
    allocation_mode: str = ""
    enable_offload: Annotated[bool, NotBuilt()] = False
    total_train_epochs: Annotated[int, Field(ge=1)] = 1
    total_train_steps: Annotated[int, Field(ge=1)] | None = None
    total_train_n_seqs: Annotated[int | None, NotBuilt()] = None
    tokenizer_path: str = ""
    dynamic_bs: Annotated[bool, NotBuilt()] = False
    # ours
    deterministic: bool = False
    watchdog_secs: Annotated[float, Field(gt=0)] = 600.0
    reward: str = "geometry3k"  # or exact_match, or module:function
    reward_kwargs: dict[str, Any] = Field(default={})

    cluster: Cluster = Cluster()
    scheduler: Scheduler = Scheduler()
    train_dataset: TrainDataset
    valid_dataset: ValidDataset | None = None
    gconfig: Generation = Generation()
    eval_gconfig: Generation | None = None
    rollout: Rollout = Rollout()
    actor: Actor = Actor()
    ref: Actor | None = None
    critic: Annotated[Critic | None, NotBuilt()] = None
    sglang: SGLang = SGLang()
    vllm: Vllm = Vllm()
    saver: Saver = Saver()
    evaluator: Evaluator = Evaluator()
    recover: Recover = Recover()
    stats_logger: StatsLogger = StatsLogger()
    perf_tracer: PerfTracer | None = None
    # ours
    paths: Paths = Paths()
    weight_sync: WeightSync = WeightSync()
    deadlines: Deadlines = Deadlines()
    embedded: Embedded = Embedded()
    slurm: Slurm = Slurm()
    ray: dict[str, Any] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _follow(cls, value: Any) -> Any:
        return follow(value)[0] if isinstance(value, dict) else value

    def dump_yaml(self) -> str:
        """The resolved file: every key, and `load` reads it back equal."""
        return yaml.safe_dump(_escaped(self.model_dump(mode="json")), sort_keys=False, allow_unicode=True, width=120)


def follow(written: dict[str, Any]) -> tuple[dict[str, Any], set[tuple[str | int, ...]]]:
    """The tree with the keys that take the value of another one where they are not written, and which those are."""
    tree = {key: dict(item) if isinstance(item, dict) else item for key, item in written.items()}
    filled: set[tuple[str | int, ...]] = set()
    for missing, source in FOLLOWS:
        found = _get(tree, source)
        if found is not None and _get(tree, missing) in (None, ""):
            _put(tree, missing, found)
            filled.add(missing)
    if tree.get("ref") is None and _get(tree, ("actor", "kl_ctl")) is None:
        _put(tree, ("actor", "kl_ctl"), 0.0)
    return tree, filled


def _get(tree: dict[str, Any], path: tuple[str, ...]) -> Any:
    for key in path:
        if not isinstance(tree, dict):
            return None
        tree = tree.get(key)  # type: ignore[assignment]
    return tree


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Sets it, unless that would make an optional section (ref, valid_dataset) appear."""
    if len(path) == 2:
        inner = tree.setdefault(path[0], {}) if path[0] in ("actor", "rollout") else tree.get(path[0])
        if isinstance(inner, dict):
            inner[path[1]] = value
    else:
        tree[path[0]] = value


def _escaped(value: Any) -> Any:
    """A literal ${ must not be read as an interpolation the second time."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value
