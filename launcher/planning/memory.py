"""An estimate of the memory of each GPU, part by part, and of the disk that a run fills.

Training: float32 masters, gradients and AdamW moments are sharded over d × c (one replica group), text weights over t
as well; one unit at a time is gathered in the compute dtype. Inference: weights over t × p, the rest of the server's
share is KV cache. Activations are counted from the tensors that the backward pass keeps.
"""

from __future__ import annotations

from core.config import Config
from launcher.allocation import Component
from launcher.model_sizes import ModelShape
from launcher.planning.batch import Lengths, steps_of
from launcher.planning.known import Known
from launcher.planning.layout import BatchPlan, Memory
from launcher.planning.problem import Problem

GIB = float(1 << 30)
BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "auto": 2, "half": 2, "float": 4}
LOGIT_ROWS = 2048
_RUNTIME_GIB = 2.0  # context, NCCL buffers, fragmentation
_SERVER_RUNTIME_GIB = 1.0


def training_memory(
    config: Config, component: Component, shape: ModelShape, batch: BatchPlan, lengths: Lengths, limit: float
) -> Memory:
    """Estimate for one training GPU."""
    dims, actor = component.dims, config.actor
    shards = max(1, dims.d // actor.archon.dp_replicate) * dims.c
    vision = shape.vision.params if shape.vision else 0
    held = (shape.text_params / dims.t + vision) / shards
    trained = held - (vision / shards if actor.freeze_vision else 0)
    width = BYTES[actor.dtype]
    parts = {
        "masters": 4 * held,
        "gradients": 4 * trained,
        "moments": 8 * trained,
        "compute copy": width * _gathered_params(config, shape, dims.t),
        "gradient buffers": 2 * 4 * shape.layer_params / dims.t,
        "activations": width * _activation_elements(config, shape, dims.t, dims.c, batch, lengths),
        # logits, their exponentials and their gradient of one chunk, in float32
        "logits chunk": 3 * 4 * min(LOGIT_ROWS, batch.tokens_per_micro_batch / dims.c) * shape.vocab / dims.t,
    }
    if config.type == "rl" and config.ref is not None:
        parts["reference model"] = 4 * held
    return _memory("training", {**parts, "runtime": _RUNTIME_GIB * GIB if limit else 0.0}, limit)


def _gathered_params(config: Config, shape: ModelShape, t: int) -> float:
    """Parameters that are whole at once: embedding and head, two layers (one prefetched), the tower."""
    vision = shape.vision.params if shape.vision else 0
    if config.actor.archon.reshard_after_forward_policy == "never":
        return shape.text_params / t + vision
    return (shape.ends_params + 2 * shape.layer_params) / t + vision


def _activation_elements(
    config: Config, shape: ModelShape, t: int, c: int, batch: BatchPlan, lengths: Lengths
) -> float:
    """Elements of the compute dtype that the backward pass of one micro-batch keeps."""
    tokens = batch.tokens_per_micro_batch / c
    # compiled blocks fuse norms, rope and the gate; eager ones keep every intermediate
    norms, attention, gates = (6, 2, 3) if config.actor.archon.enable_compile else (10, 3, 4)
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    layer = norms * shape.hidden + (attention * heads + gates * shape.intermediate) / t
    elements = tokens * _kept(config, shape.layers, shape.hidden, layer)
    if shape.vision and not config.actor.freeze_vision:
        tower = shape.vision
        in_flight = max(1, batch.tokens_per_micro_batch // max(1, lengths.sample)) * lengths.image
        patches = min(in_flight, batch.tokens_per_micro_batch) * tower.merge**2
        block = norms * tower.hidden + attention * 3 * tower.hidden + gates * tower.intermediate
        elements += patches * _kept(config, tower.depth, tower.hidden, block)
    return elements


def _kept(config: Config, layers: int, boundary: int, layer: float) -> float:
    mode = config.actor.archon.ac_mode if config.actor.gradient_checkpointing else "none"
    if mode == "none":
        return layers * layer
    recomputed = boundary * layers + 1.5 * layer
    return recomputed if mode == "full" else recomputed + 0.5 * layers * layer


def inference_memory(
    config: Config, component: Component, shape: ModelShape, lengths: Lengths, limit: float
) -> tuple[Memory, str]:
    """Estimate for one inference GPU, and a line that says how many requests its KV cache holds."""
    dims = component.dims
    backend = component.backend
    width, kv_width, share = _server_settings(config, backend)
    weights = width * shape.params / (dims.t * dims.p)
    per_token = kv_bytes_per_token(shape, dims.t, dims.p, kv_width)
    longest = lengths.sample
    if backend == "embedded" or not limit:
        pool = float(per_token * longest * config.embedded.max_running_requests)
    else:
        pool = max(share * limit * GIB - weights - _SERVER_RUNTIME_GIB * GIB, per_token * longest)
    parts = {"weights": weights, "kv cache": pool, "runtime": _SERVER_RUNTIME_GIB * GIB if limit else 0.0}
    room = int(pool // per_token)
    line = f"kv cache of a server holds {room:,} tokens: {room // max(1, longest)} requests of {longest:,} at once"
    return _memory("inference", parts, share * limit), line


def kv_bytes_per_token(shape: ModelShape, t: int, p: int, width: int) -> float:
    heads = max(1, shape.kv_heads // t)
    return 2 * shape.layers / p * heads * shape.head_dim * width


def _server_settings(config: Config, backend: str) -> tuple[int, int, float]:
    """Bytes of a weight and of a KV entry, and the share of the card that the server may fill."""
    if backend == "embedded":
        width = BYTES[config.embedded.dtype]
        return width, width, 0.9
    if backend == "sglang":
        width = BYTES.get(config.sglang.dtype, 2)
        kv = config.sglang.kv_cache_dtype
        return width, 1 if kv.startswith("fp8") else width, config.sglang.mem_fraction_static or 0.88
    width = BYTES.get(config.vllm.dtype, 2)
    return width, width, config.vllm.gpu_memory_utilization


def _memory(partition: str, parts: dict[str, float], limit: float) -> Memory:
    in_gib = {name: round(size / GIB, 6) for name, size in parts.items()}
    return Memory(partition, in_gib, round(sum(in_gib.values()), 6), round(limit, 6))


def memory_problems(memory: list[Memory]) -> list[Problem]:
    problems = []
    for each in memory:
        if each.limit and each.total > each.limit:
            largest = sorted(each.parts.items(), key=lambda item: -item[1])[:3]
            shown = ", ".join(f"{name} {size:.1f}" for name, size in largest)
            problems.append(
                Problem(
                    "cluster.gpu_memory_gib",
                    f"each {each.partition} GPU would hold {each.total:.1f} GiB ({shown}) of {each.limit:.1f}",
                    layout=True,
                    place="allocation_mode",
                )
            )
    return problems


def disk_bytes(config: Config, known: Known, samples: int) -> int:
    """What the run directory grows to: versions, checkpoints, hub checkpoints, the batches that are kept."""
    shape, width = known.shape, BYTES[config.actor.dtype]
    model = width * shape.params
    total = 0
    if config.type == "rl":
        total += (config.weight_sync.keep + 2) * model
        total += 3 * samples * 64 * 1024
    if config.recover.mode not in ("disabled", "off"):
        total += (config.recover.keep + 1) * 12 * shape.params
    steps = steps_of(config, known)
    saver = config.saver
    if saver.freq_steps or saver.freq_epochs or saver.freq_secs:
        total += (_saves(config, steps) + 1) * model
    return total


def _saves(config: Config, steps: int | None) -> int:
    """Hub checkpoints of the whole run; the final one where that is not known."""
    saves = 0
    if steps and config.saver.freq_steps:
        saves += steps // config.saver.freq_steps
    if config.saver.freq_epochs:
        saves += config.total_train_epochs // config.saver.freq_epochs
    return saves
