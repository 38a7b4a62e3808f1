"""What no other layout would cure: contexts, image tokens, pixel limits, sampling that training cannot use."""

from __future__ import annotations

from collections.abc import Iterator

from core.config import Config
from launcher.allocation import Allocation, Component
from launcher.planning.batch import Lengths, lengths_of
from launcher.planning.known import Known
from launcher.planning.problem import Problem

_TOP_K_OFF = 100_000_000


def limit_problems(config: Config, allocation: Allocation | None, known: Known) -> list[Problem]:
    """Every one of them; the allocation, where it could be read, says which server's context counts."""
    lengths = lengths_of(config, known)
    server = next((each for each in allocation.components if each.is_inference), None) if allocation else None
    problems = [*_image_problems(config, known, lengths)]
    if config.type == "rl":
        problems += _sampling_problems(config)
        problems += _order_problems(config)
        if server is not None:
            problems += _context_problems(config, server, known, lengths)
            problems += _deterministic_problems(config, server)
    elif known.shape.max_positions and lengths.sample > known.shape.max_positions:
        problems.append(Problem("train_dataset.max_length", f"prompts of {lengths.sample} tokens; {_positions(known)}"))
    return problems


def context_of(config: Config, backend: str, known: Known) -> tuple[str, int | None]:
    """The key and the value of a server's context, with the model's own where the key is null."""
    key, value = {
        "sglang": ("sglang.context_length", config.sglang.context_length),
        "vllm": ("vllm.max_model_len", config.vllm.max_model_len),
    }.get(backend, ("embedded.context_length", config.embedded.context_length))
    return key, value if value is not None else known.shape.max_positions


def _context_problems(config: Config, server: Component, known: Known, lengths: Lengths) -> Iterator[Problem]:
    key, context = context_of(config, server.backend, known)
    if context is None:
        return
    if known.shape.max_positions and context > known.shape.max_positions:
        yield Problem(key, f"{context} is more than {_positions(known)}")
    # not measured: what an image of max_pixels alone takes, which is certain
    prompt = lengths.prompt if lengths.measured else min(lengths.image, lengths.prompt)
    longest = prompt + config.gconfig.max_new_tokens
    if longest > context:
        source = "the longest that prepare measured" if lengths.measured else "one image of dataset_kwargs.max_pixels"
        yield Problem(
            "gconfig.max_new_tokens",
            f"a prompt of {prompt} tokens ({source}) + {config.gconfig.max_new_tokens} new ones = "
            f"{longest}, over {key}={context}; raise that, or lower max_new_tokens or dataset_kwargs.max_pixels",
        )


def _positions(known: Known) -> str:
    return f"the {known.shape.max_positions} positions of {known.shape.name} (max_position_embeddings)"


def _image_problems(config: Config, known: Known, lengths: Lengths) -> Iterator[Problem]:
    shape, limit = known.shape, config.actor.mb_spec.max_tokens_per_mb
    if shape.vision is None:
        return
    if limit and lengths.image > limit:
        pixels = limit * (shape.vision.patch * shape.vision.merge) ** 2
        yield Problem(
            "actor.mb_spec.max_tokens_per_mb",
            f"{limit} is less than one image: dataset_kwargs.max_pixels="
            f"{config.train_dataset.dataset_kwargs['max_pixels']} gives {lengths.image} tokens; "
            f"raise it to {lengths.image + 512}, or max_pixels to at most {pixels}",
        )
    for name in ("train_dataset", "valid_dataset"):
        dataset = getattr(config, name)
        if dataset is None:
            continue
        least, most = dataset.dataset_kwargs["min_pixels"], dataset.dataset_kwargs["max_pixels"]
        if shape.max_pixels is not None and most > shape.max_pixels:
            yield Problem(
                f"{name}.dataset_kwargs.max_pixels",
                f"{most} is over max_pixels={shape.max_pixels} of the checkpoint's preprocessor_config.json: "
                f"a server would resize such an image again; at most {shape.max_pixels}",
            )
        if shape.min_pixels is not None and least < shape.min_pixels:
            yield Problem(
                f"{name}.dataset_kwargs.min_pixels",
                f"{least} is below min_pixels={shape.min_pixels} of the checkpoint's preprocessor_config.json: "
                f"a server would resize such an image again; at least {shape.min_pixels}",
            )


def _sampling_problems(config: Config) -> Iterator[Problem]:
    why = "training needs the log-probability of what was sampled, under the whole distribution"
    gconfig = config.gconfig
    if gconfig.greedy:
        yield Problem("gconfig.greedy", f"true: every answer of a group would be the same; {why}")
    if gconfig.temperature == 0:
        yield Problem("gconfig.temperature", f"0 is greedy; {why}; write 1.0")
    if gconfig.top_p < 1:
        yield Problem("gconfig.top_p", f"{gconfig.top_p}: only 1.0 can be trained; {why}")
    if 0 < gconfig.top_k < min(_TOP_K_OFF, 1 << 20):
        yield Problem("gconfig.top_k", f"{gconfig.top_k}: leave it out; {why}")
    for name in ("min_p", "frequency_penalty", "presence_penalty"):
        if getattr(gconfig, name, 0.0):
            yield Problem(f"gconfig.{name}", f"{getattr(gconfig, name)}: only 0 can be trained; {why}")
    if getattr(gconfig, "repetition_penalty", 1.0) != 1.0:
        yield Problem("gconfig.repetition_penalty", f"only 1 can be trained; {why}")


def _order_problems(config: Config) -> Iterator[Problem]:
    consumed, batch = config.rollout.consumer_batch_size, config.train_dataset.batch_size
    if consumed != batch:
        yield Problem(
            "rollout.consumer_batch_size",
            f"{consumed} differs from train_dataset.batch_size={batch}: a step consumes one batch; leave it out",
        )


def _deterministic_problems(config: Config, server: Component) -> Iterator[Problem]:
    if not config.deterministic:
        return
    if config.rollout.max_head_offpolicyness:
        yield Problem("rollout.max_head_offpolicyness", "deterministic mode is synchronous: 0")
    if server.backend != "embedded":
        yield Problem("deterministic", f"only with the embedded backend, not {server.backend}")


def limit_warnings(config: Config, known: Known, *, emulate: bool = False) -> list[str]:
    lengths, limit = lengths_of(config, known), config.actor.mb_spec.max_tokens_per_mb
    warnings = []
    if limit and lengths.image <= limit < lengths.sample:
        warnings.append(
            f"actor.mb_spec.max_tokens_per_mb={limit}: the longest sample has {lengths.sample} tokens and is "
            "then a micro-batch of its own"
        )
    if known.shape.source == "carried":
        warnings.append(f"sizes of {known.shape.name} are the carried ones: its config.json is not on this machine")
    if known.prepared is None:
        how = "prepare --emulate" if emulate else "prepare"
        warnings.append(f"prompt lengths are guessed from dataset_kwargs.max_pixels: run {how} to measure them")
    elif known.prepared.bad_rows:
        warnings.append(f"prepare found {known.prepared.bad_rows} bad rows of {known.prepared.rows}; they become void")
    actor, alone = config.actor, config.type == "rl" and config.gconfig.n_samples == 1
    if alone and not (actor.reward_norm or actor.adv_norm):
        warnings.append(
            "no baseline: gconfig.n_samples=1 and neither actor.reward_norm nor actor.adv_norm; "
            "GRPO has n_samples of 2 or more and reward_norm by group"
        )
    timed = config.evaluator
    if (timed.freq_steps or timed.freq_epochs or timed.freq_secs) and config.valid_dataset is None:
        warnings.append("evaluator is set but there is no valid_dataset: nothing is evaluated")
    return warnings


def exposure_warnings(config: Config, allocation: Allocation | None) -> list[str]:
    """vLLM listens on a unix socket of this user; SGLang cannot, and has no key that covers every route."""
    server = next((each for each in allocation.components if each.is_inference), None) if allocation else None
    if server is None or server.backend != "sglang" or config.scheduler.type == "local":
        return []
    if config.scheduler.type == "slurm" and config.slurm.of("inference").exclusive:
        return []
    cure = "slurm.exclusive=true keeps others off its nodes" if config.scheduler.type == "slurm" else "share no node"
    return [f"sglang servers listen on loopback without a key: who else has a process on the node can ask them; {cure}"]
