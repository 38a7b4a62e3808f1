"""What actor, ref and critic share: the model, its optimizer, its micro-batches and how it is spread over ranks."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from core.config.base import Foreign, NotBuilt, Section
from core.config.megatron import MEGATRON
from core.config.scheduling import SchedulingSpec, SchedulingStrategy

Dtype = Literal["bfloat16", "float16", "float32", "float64"]


class MicroBatchSpec(Section):
    n_mbs: Annotated[int, Field(ge=1)] | None = 1
    granularity: Annotated[int, Field(ge=1)] = 1
    max_tokens_per_mb: Annotated[int, Field(ge=1)] | None = None
    n_mbs_divisor: Annotated[int, Field(ge=1)] = 1
    packing_algorithm: Literal["ffd", "kk"] = "ffd"


class Optimizer(Section):
    type: Annotated[Literal["adam", "sgd", "adam_bf16"], NotBuilt(("adam", "sgd"))] = "adam"
    lr: Annotated[float, Field(ge=0)] = 0.001
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Annotated[float, Field(gt=0)] = 1e-8
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps_proportion: Annotated[float, Field(ge=0, le=1)] = 0.001
    offload: Annotated[bool, NotBuilt()] = False
    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0

    foreign: ClassVar[dict[str, Foreign]] = {
        "initial_loss_scale": Foreign(2.0**32, why="is for float16 training"),
        "min_loss_scale": Foreign(1.0, why="is for float16 training"),
        "loss_scale_window": Foreign(5, why="is for float16 training"),
        "hysteresis": Foreign(2, why="is for float16 training"),
    }


class Fsdp(Section):
    offload_params: Annotated[bool, NotBuilt()] = False
    memory_efficient_load: bool = False  # what is always done here

    foreign: ClassVar[dict[str, Foreign]] = {
        "wrap_policy": Foreign({"transformer_layer_cls_to_wrap": None}, why="is the model's own choice (fsdp_units)")
    }


class Archon(Section):
    attn_type: Annotated[Literal["varlen", "sdpa", "tree"], NotBuilt(("varlen", "sdpa"))] = "varlen"
    offload_params: Annotated[bool, NotBuilt()] = False
    enable_compile: bool = True  # of the blocks, where there is a GPU
    ac_mode: Annotated[
        Literal["none", "full", "selective", "memory_budget"], NotBuilt(("none", "full", "selective"))
    ] = "selective"
    selective_ac_option: str = "op"
    ac_memory_budget: Annotated[float, Field(ge=0, le=1)] = 0.5
    ac_preserve_rng_state: bool = False
    pp_schedule: Literal["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"] = "Interleaved1F1B"
    pp_layers_per_stage: Annotated[int, Field(ge=1)] | None = None
    pp_first_stage_less_layers: Annotated[int, Field(ge=0)] = 1
    pp_last_stage_less_layers: Annotated[int, Field(ge=0)] = 1
    reshard_after_forward_policy: Literal["default", "always", "never"] = "default"
    use_deterministic_algorithms: bool = False
    dp_replicate: Annotated[int, Field(ge=1)] = 1  # ours: replicas of a sharded model (HSDP)
    cp_style: Literal["ulysses", "allgather"] = "ulysses"  # ours

    foreign: ClassVar[dict[str, Foreign]] = {"ac_debug": Foreign(False)}


class TrainEngine(Section):
    experiment_name: str | None = None
    trial_name: str | None = None
    path: str = ""
    init_from_scratch: Annotated[bool, NotBuilt()] = False
    temperature: Annotated[float, Field(gt=0)] = 1.0
    mb_spec: MicroBatchSpec = MicroBatchSpec()
    pad_to_maximum: Annotated[bool, NotBuilt()] = False
    disable_dropout: bool = False
    gradient_checkpointing: bool = False
    dtype: Dtype = "bfloat16"
    grad_reduce_dtype: Dtype = "float32"
    optimizer: Optimizer | None = None
    fsdp: Fsdp = Fsdp()
    archon: Archon = Archon()
    use_lora: Annotated[bool, NotBuilt()] = False
    lora_rank: Annotated[int, Field(ge=1)] = 32
    lora_alpha: Annotated[int, Field(ge=1)] = 16
    target_modules: tuple[str, ...] = ()
    peft_type: str = "lora"
    enable_tree_training: Annotated[bool, NotBuilt()] = False
    scheduling_spec: tuple[SchedulingSpec, ...] = (SchedulingSpec(),)
    scheduling_strategy: SchedulingStrategy = SchedulingStrategy()

    foreign: ClassVar[dict[str, Foreign]] = {
        "attn_impl": Foreign("flash_attention_2", also=("sdpa",), why="is chosen by archon.attn_type"),
        "is_critic": Foreign(False),
        "weight_update_mode": Foreign("xccl", silent=("disk",), why="is always disk here"),
        "megatron": MEGATRON,
    }
