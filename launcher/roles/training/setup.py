"""A rank from its arguments to a loaded model on the mesh: what both loops (rl, sft) start from.

Owns the order of starting up; the loops own what happens then.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core import config as configuration
from core.data.hub import resolve
from core.engine.documents import TokenRules
from core.engine.microbatch import Limits
from core.engine.train_engine import TrainEngine
from core.parallel.mesh import Degrees, Mesh, build_mesh, join
from launcher.planning.layout import Plan
from launcher.roles.arguments import RoleArguments
from launcher.roles.training.exchange import Exchange, StopFlags
from launcher.roles.training.services import Pixels, Services
from models.archon.qwen2.infra.parallelize import master_dtype, parallelize
from models.archon.registry import family_of

COLLECTIVE_MARGIN_SECS = 120.0  # a rank that waits for a service must give up before those that wait for it


@dataclass
class Session:
    """Everything a loop needs; made once a rank."""

    arguments: RoleArguments
    config: configuration.Config
    mesh: Mesh
    exchange: Exchange
    stop: StopFlags
    engine: TrainEngine
    ref: TrainEngine | None
    rules: TokenRules
    limits: Limits
    services: Services
    pixels: Pixels
    model_files: Path  # directory whose configuration and tokenizer go with every published version

    @property
    def is_first(self) -> bool:
        return self.mesh.rank == 0

    @property
    def generation(self) -> int:
        return self.arguments.generation


def open_session(arguments: RoleArguments) -> Session:
    """Joins the other ranks and builds the model; collective."""
    config = configuration.load(arguments.run_dir.config, [])
    plan = Plan.from_json(arguments.run_dir.plan.read_text())
    session = session_on(_join(arguments, plan, config), arguments, config)
    session.stop.install()
    return session


def choose_algorithms(config: configuration.Config) -> None:
    """Deterministic ones for all of this process, where the configuration asks for them."""
    if config.deterministic or config.actor.archon.use_deterministic_algorithms:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first product runs
        torch.use_deterministic_algorithms(True)


def session_on(mesh: Mesh, arguments: RoleArguments, config: configuration.Config) -> Session:
    """The model and everything around it on a mesh that is there."""
    exchange = Exchange(mesh)
    stop = StopFlags(exchange)
    choose_algorithms(config)
    torch.manual_seed(config.seed)
    cache = config.paths.cache
    engine, args = build_engine(config.actor, mesh, cache=cache, optimizer=config.actor.optimizer)
    ref = None
    if config.ref is not None and config.type == "rl" and config.actor.kl_ctl > 0:
        ref = build_engine(config.ref, mesh, cache=cache, optimizer=None)[0]
    rules = TokenRules(
        image_token_id=args.image_token_id,
        video_token_id=args.video_token_id,
        merge=args.spatial_merge_size,
        tokens_per_second=args.tokens_per_second,
        temperature=config.actor.temperature if config.type == "rl" else 1.0,
        ends=tuple(sorted({*args.eos_token_ids, *config.gconfig.stop_token_ids})),
        min_new_tokens=config.gconfig.min_new_tokens if config.type == "rl" else 0,
    )
    limits = Limits.from_config(
        config.actor.mb_spec, merge=args.spatial_merge_size, patch_cost=patch_cost(engine.parameters)
    )
    services = Services(arguments.daemon, arguments.run_dir.read_token(), patience=config.watchdog_secs)
    return Session(
        arguments, config, mesh, exchange, stop, engine, ref, rules, limits, services, Pixels(services), Path(args.path)
    )


def build_engine(section: Any, mesh: Mesh, *, cache: str, optimizer: Any) -> tuple[TrainEngine, Any]:
    """The model of `section.path`, sharded before its weights are read, so that no rank holds it whole."""
    path = resolve(section.path, cache=cache, kind="model")
    family = family_of(path)
    compute = getattr(torch, section.dtype)
    args = family.args.from_pretrained(path, dtype=master_dtype(compute))
    model = family.model.on_meta(args, team=mesh.team, cp_style=section.archon.cp_style)
    parallelize(model, mesh, section)
    model.to_empty(device=mesh.device)
    model.tie()
    family.adapter(args).load_into(model, args.path)
    if optimizer is None:
        model.requires_grad_(False)
    return TrainEngine(model, mesh, optimizer, compute_dtype=compute), args


def patch_cost(parameters: dict[str, Any]) -> float:
    """Work of the tower per patch over the decoder's per token: the ratio of their weights (embedding left out)."""
    tower = sum(p.numel() for name, p in parameters.items() if name.startswith("visual.") and ".merger." not in name)
    text = sum(p.numel() for name, p in parameters.items() if ".layers." in name or name.startswith("lm_head"))
    return tower / text if text else 0.0


def _join(arguments: RoleArguments, plan: Plan, config: configuration.Config) -> Mesh:
    rank, world = arguments.rank or 0, arguments.world or 1
    partition = plan.partition("training")
    assert partition is not None, "the plan has no training partition"
    if plan.device == "cuda":
        torch.cuda.set_device(0)  # each rank sees its own card only
        device = torch.device("cuda", 0)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    if arguments.store is not None:
        host, _, port = arguments.store.rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
        # the process group's keys of each generation are its own: a dead generation leaves some behind
        scoped = dist.PrefixStore(f"gen/{arguments.generation}", store)
        timeout = max(config.watchdog_secs, config.rollout.setup_timeout) + COLLECTIVE_MARGIN_SECS
        join(scoped, rank=rank, world=world, device=device, timeout=timeout)
    degrees = Degrees.of_allocation(partition.d, partition.c, partition.t, config.actor.archon.dp_replicate)
    return build_mesh(degrees, rank=rank, device=device)


def close_session(session: Session) -> None:
    """Leaves the process group, all ranks together."""
    if dist.is_initialized():
        session.exchange.barrier()
        dist.destroy_process_group()
