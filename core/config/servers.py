"""Sections `sglang` and `vllm`: flags of the inference servers; the allocation picks which one is read.

The names are the servers' own: those of AReaL with its defaults here, every other flag of the tested versions as an
extra that core.config.flags knows (core.config.checks refuses the rest). `extra` takes any flag, known or not.
"""

from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field

from core.config.base import Foreign, Section

OptionalInt = int | None
Share = Annotated[float, Field(gt=0, le=1)]


class ServerSection(Section):
    model_config = ConfigDict(extra="allow")


LACKING = "is no flag of the tested versions"


class SGLang(ServerSection):
    model_path: str = ""  # nothing but actor.path: the servers serve what is trained
    random_seed: int = 1
    skip_tokenizer_init: bool = False
    disable_cuda_graph: bool = False
    disable_radix_cache: bool = True
    disable_cuda_graph_padding: bool = False
    enable_nccl_nvls: bool = False
    disable_outlines_disk_cache: bool = False
    disable_custom_all_reduce: bool = False
    disable_overlap_schedule: bool = False
    enable_mixed_chunk: bool = False
    enable_dp_attention: bool = False
    enable_torch_compile: bool = False
    torch_compile_max_bs: int = 32
    enable_p2p_check: bool = False
    triton_attention_reduce_in_fp32: bool = False
    triton_attention_num_kv_splits: int = 8
    num_continuous_decode_steps: int = 1
    enable_memory_saver: bool = False
    allow_auto_truncate: bool = False
    attention_backend: str | None = "fa3"
    enable_multimodal: bool = False  # consumed by us
    sampling_backend: str | None = None
    context_length: Annotated[int, Field(ge=1)] | None = 32768
    mem_fraction_static: Share | None = 0.9
    max_running_requests: Annotated[int, Field(ge=1)] | None = None
    chunked_prefill_size: OptionalInt = -1
    max_prefill_tokens: int = 32768
    schedule_policy: str = "lpm"
    schedule_conservativeness: float = 1.0
    cpu_offload_gb: int = 0
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    dp_size: int = 1
    ep_size: int = 1
    enable_lora: bool | None = None
    max_lora_rank: OptionalInt = None
    max_loaded_loras: int = 8
    lora_paths: tuple[str, ...] | None = None
    lora_backend: str = "triton"
    log_level: str = "warning"
    log_level_http: str | None = "warning"
    log_requests: bool = False
    log_requests_level: int = 0
    show_time_cost: bool = False
    enable_metrics: bool = True
    decode_log_interval: int = 1
    enable_return_routed_experts: bool = False
    extra: dict[str, Any] = Field(default={})  # ours

    foreign: ClassVar[dict[str, Foreign]] = {
        "enable_ep_moe": Foreign(False, why=LACKING),
        "cuda_graph_max_bs": Foreign(None, why=LACKING),
        "cuda_graph_bs": Foreign(None, why=LACKING),
        "torchao_config": Foreign("", why=LACKING),
        "enable_nan_detection": Foreign(False, why=LACKING),
        "enable_multithread_load": Foreign(False, why=LACKING),
    }


class Vllm(ServerSection):
    model: str = ""  # nothing but actor.path: the servers serve what is trained
    seed: int = 1
    skip_tokenizer_init: bool = False
    enforce_eager: bool = False
    dtype: str = "bfloat16"
    distributed_executor_backend: str = "mp"
    max_num_seqs: Annotated[int, Field(ge=1)] = 256
    block_size: int = 16
    cpu_offload_gb: float = 0.0
    disable_sliding_window: bool = True
    max_model_len: Annotated[int, Field(ge=1)] | None = 32768
    no_enable_chunked_prefill: bool = False
    no_enable_prefix_caching: bool = True
    gpu_memory_utilization: Share = 0.9
    enable_multimodal: bool = False  # consumed by us
    enable_sleep_mode: bool = False
    uvicorn_log_level: str = "warning"
    enable_lora: bool = False
    max_lora_rank: int = 16
    max_loras: int = 8
    lora_modules: tuple[str, ...] | None = None
    extra: dict[str, Any] = Field(default={})  # ours

    foreign: ClassVar[dict[str, Foreign]] = {
        "swap_space": Foreign(4, why=LACKING),
        "worker_extension_cls": Foreign("areal.engine.vllm_ext.vllm_worker_extension.VLLMWorkerExtension"),
    }
