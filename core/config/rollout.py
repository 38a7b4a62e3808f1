"""Sections `rollout` and `embedded`: how many answers are in flight, how old they may be, what happens to failures."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from core.config.base import Foreign, NotBuilt, Section
from core.config.scheduling import SchedulingSpec, SchedulingStrategy

OPENAI = {
    "mode": "inline",
    "tool_call_parser": "qwen",
    "reasoning_parser": "qwen3",
    "chat_template_type": "hf",
    "engine_max_tokens": None,
    "turn_discount": 1.0,
    "export_style": "individual",
    "subproc_max_workers": 4,
    "session_timeout_seconds": 3600,
    "admin_api_key": "areal-admin-key",
}


class Rollout(Section):
    experiment_name: str | None = None
    trial_name: str | None = None
    fileroot: str | None = None
    tokenizer_path: str = ""
    max_concurrent_rollouts: Annotated[int, Field(ge=1)] | None = None  # groups; null = no limit
    queue_size: Annotated[int | None, NotBuilt()] = None
    consumer_batch_size: Annotated[int, Field(ge=1)] = 1  # not written = train_dataset.batch_size
    max_head_offpolicyness: Annotated[int, Field(ge=0)] = 0
    enable_rollout_tracing: bool = False
    check_trajectory_format: bool = False  # what is always done here
    schedule_policy: Literal["round_robin"] = "round_robin"
    dump_to_file: bool = False
    setup_timeout: Annotated[float, Field(gt=0)] = 300.0
    request_timeout: Annotated[float, Field(gt=0)] = 3600.0
    request_retries: Annotated[int, Field(ge=0)] = 3
    pause_grace_period: Annotated[float, Field(ge=0)] = 0.0
    scheduling_spec: tuple[SchedulingSpec, ...] = (SchedulingSpec(),)
    scheduling_strategy: SchedulingStrategy = SchedulingStrategy()
    use_lora: Annotated[bool, NotBuilt()] = False
    # ours
    max_consecutive_failures: Annotated[int, Field(ge=1)] = 16
    reward_timeout: Annotated[float, Field(gt=0)] = 30.0
    reward_workers: Annotated[int, Field(ge=1, le=4096)] = 2
    server_deadline: Annotated[float, Field(gt=0)] = 120.0  # no token for that long while work is queued
    parity: Literal["stop", "warn", "off"] = "stop"  # the trainer's log-probabilities of what the servers sampled
    parity_check_steps: Annotated[int, Field(ge=0)] | None = None  # besides before the first step
    parity_mean: Annotated[float, Field(gt=0)] = 0.05  # of |difference|; bfloat16 on both sides is seen below 0.02
    parity_max: Annotated[float, Field(gt=0)] = 3.0

    foreign: ClassVar[dict[str, Foreign]] = {
        "openai": Foreign(OPENAI, why="is for agents behind a proxy, which are not here"),
        "return_routed_experts": Foreign(False, why="is for mixtures of experts, which are not here"),
    }


class Embedded(Section):
    """Ours: the server that speaks SGLang's protocol and runs the trainer's own model."""

    max_running_requests: Annotated[int, Field(ge=1)] = 64
    context_length: Annotated[int, Field(ge=1)] | None = None
    max_prefill_tokens: Annotated[int, Field(ge=1)] = 8192
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "float32"
    stands_in: bool = True  # under --emulate, for vLLM and SGLang; false keeps them, with Pythons made for the CPU
