"""Keys of `vllm` and `sglang` beyond AReaL's: flags of the tested versions, and none that is ours to set."""

from collections.abc import Iterator
from typing import Any

from core.config.experiment import Config
from core.config.flags import Flags, flags_of
from core.config.names import nearest
from core.config.reading import Path

# said by the run itself: where a server listens, under which name and key, on how many GPUs and nodes
OURS = {
    "vllm": "host port uds served_model_name api_key tensor_parallel_size pipeline_parallel_size nnodes node_rank "
    "master_addr master_port headless enable_scale_out logprobs_mode model_tag data_parallel_size",
    "sglang": "host port served_model_name api_key admin_api_key tensor_parallel_size tp_size pipeline_parallel_size "
    "pp_size nnodes node_rank dist_init_addr nccl_port weight_version model data_parallel_size",
}


def server_flags(config: Config) -> Iterator[tuple[Path, str]]:
    for name, ours in OURS.items():
        section = getattr(config, name)
        known, reserved = flags_of(name), set(ours.split())
        for key, value in (section.model_extra or {}).items():
            said = _wrong(known, key, value, reserved, [*type(section).model_fields, *known.names()], name)
            if said:
                yield (name, key), said
        for key in section.extra:
            if key.replace("-", "_") in reserved:
                yield (name, "extra", key), _reserved()


def _wrong(known: Flags, key: str, value: Any, reserved: set[str], names: list[str], section: str) -> str | None:
    if key in reserved:
        return _reserved()
    if not known.has(key):
        near = nearest(key, names)
        hint = f"did you mean {section}.{near}? " if near else ""
        return (
            f"unknown key; {hint}(the flags of {section} {', '.join(known.versions)} are known; "
            f"another one goes under {section}.extra)"
        )
    kind, choices = known.kind(key), known.choices(key)
    if kind in ("switch", "both") and not isinstance(value, bool) and value is not None:
        return f"wants true or false; found {value!r}"
    if isinstance(value, bool) and value is False and kind == "switch":
        return None
    if choices and value is not None:
        wrong = [item for item in (value if isinstance(value, list | tuple) else [value]) if str(item) not in choices]
        if wrong:
            near = nearest(str(wrong[0]), choices)
            hint = f"; did you mean {near}?" if near else ""
            return f"wants one of {', '.join(choices)}; found {wrong[0]!r}{hint}"
    return None


def _reserved() -> str:
    return "is set by the run itself (allocation_mode says GPUs and nodes), leave it out"
