"""The memory and disk estimates against counts made by hand and against measured peaks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.config import Config
from launcher.allocation import Component, Dims
from launcher.model_sizes import carried
from launcher.plan import plan
from launcher.planning.batch import Lengths
from launcher.planning.layout import BatchPlan, Memory
from launcher.planning.memory import GIB, inference_memory, kv_bytes_per_token, training_memory

Recipe = Callable[..., Config]
# computed independently in the facts of the architecture: text 3.086 B + vision 0.669 B
PARAMS_3B = 3.755e9


def training(config: Config, name: str, dims: Dims, tokens: int, image: int = 0) -> Memory:
    shape = carried(name)
    assert shape is not None
    batch = BatchPlan(1, 1, 1, dims.d, 1, 1, tokens, None)
    lengths = Lengths(prompt=tokens, image=image, sample=tokens, measured=True)
    return training_memory(config, Component("archon", dims), shape, batch, lengths, 80.0)


def test_states_of_the_3b_are_16_bytes_a_parameter_over_the_ranks(recipe: Recipe) -> None:
    parts = training(recipe(), "Qwen/Qwen2.5-VL-3B-Instruct", Dims(d=4), 4096).parts
    assert parts["masters"] * GIB == pytest.approx(4 * PARAMS_3B / 4, rel=1e-3)
    assert parts["gradients"] * GIB == pytest.approx(4 * PARAMS_3B / 4, rel=1e-3)
    assert parts["moments"] * GIB == pytest.approx(8 * PARAMS_3B / 4, rel=1e-3)


def test_t_shards_the_text_c_and_d_shard_everything_and_replicas_nothing(recipe: Recipe) -> None:
    name = "Qwen/Qwen2.5-VL-7B-Instruct"
    text, vision = 7.616e9, 0.677e9  # the facts' count
    held = {
        Dims(d=8): (text + vision) / 8,
        Dims(d=2, t=4): (text / 4 + vision) / 2,
        Dims(d=2, c=4): (text + vision) / 8,
    }
    for dims, params in held.items():
        assert training(recipe(), name, dims, 4096).parts["masters"] * GIB == pytest.approx(4 * params, rel=1e-3)
    twice = training(recipe("actor.archon.dp_replicate=2"), name, Dims(d=8), 4096)
    assert twice.parts["masters"] * GIB == pytest.approx(4 * (text + vision) / 4, rel=1e-3)


def test_a_frozen_tower_has_no_gradients_and_no_moments(recipe: Recipe) -> None:
    frozen = training(recipe("actor.freeze_vision=true"), "Qwen/Qwen2.5-VL-3B-Instruct", Dims(d=4), 4096).parts
    assert frozen["gradients"] * GIB == pytest.approx(4 * 3.086e9 / 4, rel=1e-3)
    assert frozen["masters"] * GIB == pytest.approx(4 * PARAMS_3B / 4, rel=1e-3)


@pytest.mark.parametrize(
    ("checkpointing", "measured_gib"),
    # one H200, compiled text decoder of the 3B, 8 × 2048 tokens, forward + backward, bf16 weights and gradients
    [("none", 59.0), ("full", 14.0)],
)
def test_activations_are_not_below_what_was_measured(recipe: Recipe, checkpointing: str, measured_gib: float) -> None:
    config = recipe("actor.gradient_checkpointing=true", f"actor.archon.ac_mode={checkpointing}")
    parts = training(config, "Qwen/Qwen2.5-3B", Dims(), 8 * 2048).parts
    weights_and_gradients = 2 * 2 * 3.086e9 / GIB
    estimate = weights_and_gradients + parts["activations"]
    assert measured_gib <= estimate <= 1.25 * measured_gib


def test_logits_of_a_chunk_are_three_float32_copies(recipe: Recipe) -> None:
    parts = training(recipe(), "Qwen/Qwen2.5-VL-3B-Instruct", Dims(d=4), 4096).parts
    assert parts["logits chunk"] * GIB == pytest.approx(3 * 4 * 2048 * 151_936)


def test_parts_add_up(recipe: Recipe) -> None:
    for memory in plan(recipe()).memory:
        assert memory.total == pytest.approx(sum(memory.parts.values()), abs=1e-4)


def test_kv_cache_of_a_token() -> None:
    shape = carried("Qwen/Qwen2.5-VL-3B-Instruct")
    assert shape is not None
    # keys and values × 36 layers × 2 kv heads × 128 × bf16
    assert kv_bytes_per_token(shape, 1, 1, 2) == 2 * 36 * 2 * 128 * 2
    assert kv_bytes_per_token(shape, 2, 1, 2) == 2 * 36 * 1 * 128 * 2
    assert kv_bytes_per_token(shape, 4, 1, 2) == 2 * 36 * 1 * 128 * 2  # one kv head is the least
    assert kv_bytes_per_token(shape, 1, 2, 2) == 2 * 18 * 2 * 128 * 2


def test_a_server_keeps_what_is_left_of_its_share_for_kv(recipe: Recipe) -> None:
    shape = carried("Qwen/Qwen2.5-VL-3B-Instruct")
    assert shape is not None
    lengths = Lengths(prompt=1000, image=256, sample=1512, measured=True)
    memory, note = inference_memory(recipe(), Component("sglang", Dims(d=2, t=2)), shape, lengths, 80.0)
    weights = 2 * PARAMS_3B / 2 / GIB
    assert memory.parts["weights"] == pytest.approx(weights, rel=1e-3)
    assert memory.parts["kv cache"] == pytest.approx(0.8 * 80 - weights - 1, rel=1e-3)
    room = (0.8 * 80 - weights - 1) * GIB / (2 * 36 * 1 * 128 * 2)
    assert int(note.split(" holds ")[1].split(" ")[0].replace(",", "")) == pytest.approx(room, rel=1e-3)


def test_disk_holds_versions_checkpoints_and_saves(recipe: Recipe) -> None:
    nothing = ["saver.freq_epochs=null", "recover.mode=disabled"]
    versions = plan(recipe(*nothing)).disk_bytes
    assert versions == pytest.approx((2 + 2) * 2 * PARAMS_3B, rel=0.01)
    recovered = plan(recipe("saver.freq_epochs=null", "recover.mode=auto")).disk_bytes
    assert recovered - versions == pytest.approx((2 + 1) * 12 * PARAMS_3B, rel=0.01)
    saved = plan(recipe("recover.mode=disabled", "saver.freq_epochs=1")).disk_bytes
    assert saved - versions == pytest.approx((3 + 1) * 2 * PARAMS_3B, rel=0.01)


def test_a_cpu_plan_has_no_card_to_fill(recipe: Recipe) -> None:
    planned = plan(recipe("cluster.gpu_memory_gib=1", "allocation_mode=embedded:d1+d2"), device="cpu")
    assert [memory.limit for memory in planned.memory] == [0.0, 0.0]
