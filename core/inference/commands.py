"""Command lines and environments of vLLM and SGLang servers: pure functions of the configuration and a seat.

Owns what is written where; which server has which flag is core.config.flags', starting is launcher.roles'. No secret
is ever written here: a server that is reached through the proxy listens where nobody else can ask it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from core.config import Config
from core.config.base import Section
from core.config.flags import Flags, flags_of

OURS = frozenset({"model", "model_path", "enable_multimodal", "extra"})  # consumed here, no flag of the server
_CPU_KV_BYTES = 256 << 20
_CPU_KV_TOKENS = 16384


@dataclass(frozen=True)
class Seat:
    """Where one server (or one node's part of it) runs. `port` is the first of a block of its own."""

    python: str
    model: str
    served_name: str
    device: str
    port: int
    tensor: int = 1
    pipeline: int = 1
    nodes: int = 1
    node_rank: int = 0
    host: str = "127.0.0.1"
    """The run's interface on this node; what faces other nodes is there, HTTP never."""
    head: str = "127.0.0.1"
    """The interface of the server's first node, and the port there at which its parts meet."""
    head_port: int = 0
    socket: str | None = None
    """A unix socket to listen on instead of the port, where the server can."""
    directory: str = ""
    """Of this start alone: its TMPDIR."""


@dataclass(frozen=True)
class Launch:
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def launch(backend: str, config: Config, seat: Seat) -> Launch:
    return {"vllm": vllm, "sglang": sglang}[backend](config, seat)


def vllm(config: Config, seat: Seat) -> Launch:
    """Log-probabilities are those of the distribution sampled from; a request beyond the context is refused."""
    section = config.vllm
    first = (seat.python, "-P", "-m", "vllm.entrypoints.cli.main", "serve", seat.model)
    words: dict[str, Any] = {
        "served_model_name": seat.served_name,
        "logprobs_mode": "processed_logprobs",
        "enable_scale_out": True,
        "tensor_parallel_size": seat.tensor,
        "pipeline_parallel_size": seat.pipeline,
    }
    words |= {"uds": seat.socket} if seat.socket else {"host": "127.0.0.1", "port": seat.port}
    if seat.nodes > 1:
        words |= {"nnodes": seat.nodes, "node_rank": seat.node_rank}
        words |= {"master_addr": seat.head, "master_port": seat.head_port}
        words |= {"headless": True} if seat.node_rank else {}
    if seat.device == "cpu":
        words |= {"kv_cache_memory_bytes": _CPU_KV_BYTES}
    left_out = {"gpu_memory_utilization", "block_size"} if seat.device == "cpu" else set()
    words |= {"enforce_eager": True} if seat.device == "cpu" else {}
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",  # pause, reload and resume are development routes
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_PORT": str(seat.port + 4),
    }
    environment |= {"VLLM_HOST_IP": seat.host if seat.nodes > 1 else "127.0.0.1"}
    if seat.device == "cpu":
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return Launch((*first, *_flags("vllm", section, words, left_out)), _common() | environment)


def sglang(config: Config, seat: Seat) -> Launch:
    section = config.sglang
    first = (seat.python, "-P", "-m", "sglang.launch_server")
    words: dict[str, Any] = {
        "model_path": seat.model,
        "served_model_name": seat.served_name,
        "host": "127.0.0.1",
        "port": seat.port,
        "nccl_port": seat.port + 2,
        "tensor_parallel_size": seat.tensor,
        "pipeline_parallel_size": seat.pipeline,
        # with it, ids beside images are taken as they are; without, they are decoded and tokenised again, and sampled
        # ones come back as others (seen). What it keeps are pixels: no weights are in it
        "mm_preprocess_cache_size_mb": 256,
    }
    if seat.nodes > 1:
        words |= {"nnodes": seat.nodes, "node_rank": seat.node_rank}
        words |= {"dist_init_addr": f"{seat.head}:{seat.head_port}"}
    left_out: set[str] = set()
    environment = {"SGLANG_HOST_IP": seat.host} if seat.nodes > 1 else {}
    if not config.actor.freeze_vision:
        # an image seen before is else answered with new language weights on embeddings of the old tower
        environment["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    if seat.device == "cpu":
        words |= {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
        words |= {"max_total_tokens": _CPU_KV_TOKENS, "mem_fraction_static": 0.3, "skip_server_warmup": True}
        left_out = {"attention_backend", "sampling_backend", "mem_fraction_static"}
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        if seat.tensor * seat.pipeline > 1:  # else it wants a NUMA node for each
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(seat.tensor * seat.pipeline)))
    return Launch((*first, *_flags("sglang", section, words, left_out)), _common() | environment)


def _common() -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _flags(backend: str, section: Section, words: Mapping[str, Any], left_out: set[str]) -> Iterator[str]:
    """Ours, then the section's that say something else than the server's default, then `extra` as it stands."""
    known = flags_of(backend)
    extra: Mapping[str, Any] = getattr(section, "extra", {})
    for name, value in words.items():
        if name.replace("-", "_") not in {key.replace("-", "_") for key in extra}:
            yield from spell(known, name, value)
    for name, value in section_flags(section):
        if name in left_out or name in words or value is None or not known.has(name) or known.is_default(name, value):
            continue
        yield from spell(known, name, value)
    for name, value in extra.items():
        yield from spell(known, name.replace("-", "_"), value)


def section_flags(section: Section) -> Iterator[tuple[str, Any]]:
    """Names and values of the server's own flags in a section, written or not."""
    for name in (*type(section).model_fields, *(section.model_extra or {})):
        if name not in OURS:
            yield name, getattr(section, name)


def spell(known: Flags, name: str, value: Any) -> Iterator[str]:
    """One flag as words of a command line; null is left out, false is said where the server has a way to."""
    if value is None:
        return
    flag = known.spelling(name)
    if isinstance(value, bool):
        no = "--no-" + flag.removeprefix("--")
        kind = known.kind(name)
        if kind == "value":
            yield from (flag, str(value).lower())
        elif value:
            yield no if name.startswith("no_") and kind == "both" else flag
        elif kind in ("both", "unknown") and not name.startswith("no_"):
            yield no
    elif isinstance(value, list | tuple):
        yield from (flag, *(str(item) for item in value))
    elif isinstance(value, Mapping):
        yield from (flag, json.dumps(value))
    else:
        yield from (flag, str(value))
