"""The data process: reads the run's configuration and serves its prompts and pictures until it is told to stop.

Owns the choice of files, limits and orders; core.data.service owns the serving. Imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from core.config import Config, load
from core.data.hub import HubError, resolve
from core.data.image_pool import ImagePool
from core.data.image_store import ImageStore
from core.data.order import Order
from core.data.prompts import Recipe
from core.data.rows import Rows, RowsError, split_files
from core.data.service import DataService, Split
from core.data.tokenizer import Tokenizer, TokenizerError
from core.rpc.service import Service
from launcher.node.specs import CANNOT_GO_ON
from launcher.planning.known import TRAIN_FILES, VALID_FILES
from launcher.planning.layout import Plan
from launcher.roles import arguments


def longest_prompt(config: Config, backend: str | None) -> tuple[int | None, str]:
    """Most tokens that a prompt may have, and the key that says so.

    For rl the answer must still fit into the server's context; for sft the prompt counts with its answer.
    """
    limits: list[tuple[int, str]] = []
    if config.train_dataset.max_length is not None:
        limits.append((config.train_dataset.max_length, "train_dataset.max_length"))
    if config.type == "rl":
        context, key = _server_context(config, backend)
        if context is not None:
            left = context - config.gconfig.max_new_tokens
            limits.append((left, f"{key} = {context} less gconfig.max_new_tokens = {config.gconfig.max_new_tokens}"))
    return min(limits) if limits else (None, "")


def _server_context(config: Config, backend: str | None) -> tuple[int | None, str]:
    if backend == "sglang":
        return config.sglang.context_length, "sglang.context_length"
    if backend == "vllm":
        return config.vllm.max_model_len, "vllm.max_model_len"
    if config.embedded.context_length is not None:
        return config.embedded.context_length, "embedded.context_length"
    model = resolve(config.actor.path, cache=config.paths.cache, kind="model")
    text = json.loads((model / "config.json").read_text())
    text = text.get("text_config", text)
    return text.get("max_position_embeddings"), "max_position_embeddings of the model"


def splits(config: Config, backend: str | None) -> dict[str, Split]:
    """train, valid where there is a valid_dataset, and dev where SFT is gated.

    Raises HubError or RowsError for a dataset that is not there.
    """
    train = config.train_dataset
    kwargs = train.dataset_kwargs
    longest, longest_from = longest_prompt(config, backend)
    recipe = Recipe(
        min_pixels=kwargs["min_pixels"],
        max_pixels=kwargs["max_pixels"],
        system_prompt=kwargs["system_prompt"],
        longest=longest,
        longest_from=longest_from,
        with_answer=config.type == "sft",
    )
    path = resolve(train.path, cache=config.paths.cache, kind="dataset")
    rows = Rows(split_files(path, *((train.split,) if train.split else TRAIN_FILES)), max_rows=kwargs["max_rows"])
    order = Order(
        rows=len(rows),
        seed=config.seed,
        shuffle=train.shuffle,
        epochs=config.total_train_epochs,
        batch_size=train.batch_size if train.drop_last else None,
    )
    if order.epoch_length == 0:
        raise RowsError(
            f"{path} has {len(rows)} training rows, less than one batch of train_dataset.batch_size = "
            f"{train.batch_size}; lower it, or set train_dataset.drop_last=false"
        )
    mistaught = kwargs.get("mistaught")
    labels = {key: mistaught[key] for key in ("probability", "from_count")} if mistaught else None
    found = {"train": Split(rows, order, recipe, labels)}
    if gate := kwargs.get("gate"):
        found["dev"] = _one_pass(split_files(path, gate["split"]), None, recipe)
    if (valid := config.valid_dataset) is not None:
        theirs = valid.dataset_kwargs
        held_out = resolve(valid.path, cache=config.paths.cache, kind="dataset")
        files = split_files(held_out, *((valid.split,) if valid.split else VALID_FILES))
        changed = Recipe(
            min_pixels=theirs["min_pixels"],
            max_pixels=theirs["max_pixels"],
            system_prompt=theirs["system_prompt"] if theirs["system_prompt"] is not None else recipe.system_prompt,
            longest=longest,
            longest_from=longest_from,
            with_answer=recipe.with_answer,
        )
        found["valid"] = _one_pass(files, theirs["max_rows"], changed)
    return found


def _one_pass(files: list[Path], max_rows: int | None, recipe: Recipe) -> Split:
    rows = Rows(files, max_rows=max_rows)
    return Split(rows, Order(rows=len(rows), seed=0, shuffle=False, epochs=1), recipe)


def image_workers(config: Config) -> int:
    """Children that decode pictures: num_workers of the training set, else one for each core, at most 8."""
    return config.train_dataset.num_workers or min(8, len(os.sched_getaffinity(0)))


def make_service(config: Config, backend: str | None, *, cache: Path, run_images: Path | None) -> DataService:
    """The data service of a configuration; pictures are kept in `cache`, and found in `run_images` too."""
    tokenizer = Tokenizer(resolve(config.tokenizer_path or config.actor.path, cache=config.paths.cache, kind="model"))
    return DataService(
        splits(config, backend),
        tokenizer,
        ImagePool(image_workers(config)),
        ImageStore(cache, run_images),
        batch_size=config.train_dataset.batch_size,
        total_steps=config.total_train_steps,
    )


async def serve(options: arguments.RoleArguments) -> int:
    """Serves until SIGTERM; returns the exit status."""
    config = load(options.run_dir.config, [])
    plan = Plan.from_json(options.run_dir.plan.read_text())
    inference = plan.partition("inference")
    backend = inference.backend if inference is not None else None
    try:
        data = make_service(config, backend, cache=options.local / "images", run_images=options.run_dir.images)
    except (HubError, RowsError, TokenizerError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return CANNOT_GO_ON
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    service = Service("data", options.run_dir.read_token(), status=data.status, metrics=data.metrics)
    data.add_routes(service)
    url = await service.start(options.host)
    await asyncio.to_thread(arguments.register, options, url)
    print(f"data service at {url}: {data.info()}", flush=True)
    try:
        await stopping.wait()
    finally:
        await service.stop()
        await data.close()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return asyncio.run(serve(arguments.parse(sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())
