"""Arithmetic of one step: groups, samples, minibatches, and the micro-batches of a data-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

from core.config import Config
from launcher.planning.known import Known
from launcher.planning.layout import BatchPlan
from launcher.planning.problem import Problem

MOST_SAMPLES = 1 << 24
# question and chat template of a row that prepare has not measured
_TEXT_TOKENS = 256


@dataclass(frozen=True)
class Lengths:
    """Longest prompt and sample in tokens; `measured` by prepare, else from the pixel limit and one image."""

    prompt: int
    image: int
    sample: int
    measured: bool


def lengths_of(config: Config, known: Known) -> Lengths:
    image = known.shape.image_tokens(config.train_dataset.dataset_kwargs["max_pixels"])
    prepared = known.prepared
    if prepared is not None:
        prompt, image = prepared.max_prompt_tokens, prepared.max_image_tokens
    else:
        prompt = image + _TEXT_TOKENS
    answer = config.gconfig.max_new_tokens if config.type == "rl" else 0
    limit = config.train_dataset.max_length
    prompt = min(prompt, limit) if limit else prompt
    return Lengths(prompt, image, prompt + answer, prepared is not None)


def samples_of(config: Config) -> int:
    return config.train_dataset.batch_size * (config.gconfig.n_samples if config.type == "rl" else 1)


def batch_problems(config: Config, data_ranks: int) -> list[Problem]:
    samples = samples_of(config)
    if samples > MOST_SAMPLES:
        text = f"{samples:,} samples a step: at most {MOST_SAMPLES:,}"
        return [Problem("train_dataset.batch_size", text)]
    minibatches = config.actor.ppo_n_minibatches if config.type == "rl" else 1
    if samples % (minibatches * data_ranks) == 0:
        return []
    per = f"{config.train_dataset.batch_size} groups × gconfig.n_samples={config.gconfig.n_samples}"
    what = f"{samples} samples a step ({per})" if config.type == "rl" else f"{samples} rows a step"
    over = f"{minibatches} minibatches (actor.ppo_n_minibatches) × " if minibatches > 1 else ""
    return [
        Problem(
            "train_dataset.batch_size",
            f"{what} do not divide over {over}{data_ranks} data-parallel ranks (d of training)",
            layout=True,
        )
    ]


def batch_plan(config: Config, known: Known, data_ranks: int) -> BatchPlan:
    """Micro-batches are counted for samples of the longest length: fewer are needed when answers are shorter."""
    groups = config.train_dataset.batch_size
    samples = samples_of(config)
    minibatches = config.actor.ppo_n_minibatches if config.type == "rl" else 1
    per_rank = samples // data_ranks
    in_minibatch = max(1, per_rank // minibatches)
    longest = lengths_of(config, known).sample
    spec = config.actor.mb_spec
    if spec.max_tokens_per_mb:
        per_micro = max(1, spec.max_tokens_per_mb // longest)
        tokens = max(longest, min(spec.max_tokens_per_mb, in_minibatch * longest))
    else:
        per_micro = -(-in_minibatch // (spec.n_mbs or 1))
        tokens = per_micro * longest
    micro = max(-(-in_minibatch // per_micro), spec.n_mbs or 1)
    return BatchPlan(
        groups=groups,
        samples=samples,
        minibatches=minibatches,
        data_ranks=data_ranks,
        samples_per_rank=per_rank,
        micro_batches_per_rank=micro * minibatches,
        tokens_per_micro_batch=tokens,
        steps=steps_of(config, known),
    )


def steps_of(config: Config, known: Known) -> int | None:
    """Steps of the run, where the number of rows or total_train_steps says it."""
    dataset = config.train_dataset
    by_rows = None
    if known.train_rows is not None:
        whole = known.train_rows // dataset.batch_size
        partial = 0 if dataset.drop_last else known.train_rows % dataset.batch_size > 0
        by_rows = (whole + partial) * config.total_train_epochs
    if config.total_train_steps is None:
        return by_rows
    return config.total_train_steps if by_rows is None else min(config.total_train_steps, by_rows)


def row_problems(config: Config, known: Known) -> list[Problem]:
    """A dataset that holds less than one batch."""
    if known.train_rows is None or steps_of(config, known):
        return []
    return [
        Problem(
            "train_dataset.batch_size",
            f"{config.train_dataset.batch_size} is more than the {known.train_rows} rows of "
            f"{config.train_dataset.path}: not one whole batch; at most {known.train_rows}, or drop_last: false",
        )
    ]
