"""What must hold between keys. What needs the model, the cluster or the data is launcher.plan's."""

import re
from collections.abc import Iterator

from core.config.experiment import Config
from core.config.reading import Path
from core.config.server_flags import server_flags

Problem = tuple[Path, str]
WITH_NAMES = ("rollout", "actor", "ref", "critic", "saver", "evaluator", "recover", "stats_logger", "perf_tracer")
BUILT_IN = ("geometry3k", "exact_match")  # files of core/rewards
REWARD = re.compile(r"([A-Za-z_][\w.]*|/.*\.py):[A-Za-z_]\w*")


def check(config: Config) -> Iterator[Problem]:
    """Every contradiction, with the key at which to mend it."""
    yield from _one_run_directory(config)
    yield from _one_model(config)
    yield from _sampling(config)
    yield from _rewards(config)
    yield from _datasets(config)
    yield from server_flags(config)


def _one_run_directory(config: Config) -> Iterator[Problem]:
    top = {
        "experiment_name": config.experiment_name,
        "trial_name": config.trial_name,
        "fileroot": config.cluster.fileroot,
    }
    for section in WITH_NAMES:
        value = getattr(config, section)
        for name, wanted in top.items():
            written = getattr(value, name, None)
            if written is not None and written != wanted:
                said = f"differs from the run's own ({wanted}); a run has one directory, leave this key out"
                yield (section, name), said


def _one_model(config: Config) -> Iterator[Problem]:
    if not config.actor.path:
        yield ("actor", "path"), "must be set: a directory of the hub's layout, or a hub id"
    for path, written in (
        (("sglang", "model_path"), config.sglang.model_path),
        (("vllm", "model"), config.vllm.model),
    ):
        if written and written != config.actor.path:
            yield path, f"differs from actor.path ({config.actor.path}); the servers serve what is trained"


def _sampling(config: Config) -> Iterator[Problem]:
    gconfig = config.gconfig
    if config.type == "rl" and config.actor.temperature != gconfig.temperature and gconfig.temperature > 0:
        yield (
            ("actor", "temperature"),
            f"{config.actor.temperature} differs from gconfig.temperature ({gconfig.temperature}): "
            "the trainer must score under the distribution that was sampled",
        )
    for name in ("gconfig", "eval_gconfig"):
        section = getattr(config, name)
        if section is not None and section.min_new_tokens > section.max_new_tokens:
            yield (name, "min_new_tokens"), f"more than {name}.max_new_tokens ({section.max_new_tokens})"


def _rewards(config: Config) -> Iterator[Problem]:
    if config.reward not in BUILT_IN and not REWARD.fullmatch(config.reward):
        yield ("reward",), f"wants one of {', '.join(BUILT_IN)}, or module:function; found {config.reward!r}"
    actor = config.actor
    if config.type != "rl":
        return
    if actor.kl_ctl > 0 and config.ref is None:
        yield ("actor", "kl_ctl"), "needs the section ref (the model to stay near to), or must be 0"
    for name in ("reward_norm", "adv_norm"):
        norm = getattr(actor, name)
        if norm is None:
            continue
        if norm.std_level == "group" and config.gconfig.n_samples < 2:
            yield ("actor", name, "std_level"), "a group's std needs gconfig.n_samples of at least 2"
        if norm.mean_leave1out and norm.mean_level == "group" and config.gconfig.n_samples < 2:
            yield ("actor", name, "mean_leave1out"), "leaving one out needs gconfig.n_samples of at least 2"
    if actor.overlong_reward_penalty:
        for name in ("overlong_tokens", "overlong_penalty_factor"):
            if getattr(actor, name) is None:
                yield ("actor", name), "must be set when actor.overlong_reward_penalty is true"


def _datasets(config: Config) -> Iterator[Problem]:
    for name in ("train_dataset", "valid_dataset"):
        dataset = getattr(config, name)
        if dataset is None:
            continue
        kwargs = dataset.dataset_kwargs
        if kwargs["min_pixels"] > kwargs["max_pixels"]:
            yield (name, "dataset_kwargs", "min_pixels"), f"more than max_pixels ({kwargs['max_pixels']})"
        if name == "train_dataset" and dataset.type != config.type:
            yield (name, "type"), f"is {dataset.type}, but the top level's type is {config.type}"
        if (kwargs.get("gate") or kwargs.get("mistaught")) and config.type != "sft":
            yield (name, "dataset_kwargs"), "gate and mistaught are for type: sft"
