"""plan(): the recipe's numbers, every refusal with its reason, and suggestions that fit."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import Config, load
from launcher.allocation import parse
from launcher.model_sizes import carried
from launcher.plan import Plan, PlanError, plan, settle
from launcher.planning.change import with_value
from launcher.planning.devices import require_gpus
from launcher.planning.divisibility import cutting_problems
from tests.plan.conftest import RECIPE
from tests.support.rows import stand_in_rows

Recipe = Callable[..., Config]


def refused(config: Config) -> PlanError:
    with pytest.raises(PlanError) as caught:
        plan(config)
    return caught.value


def test_the_recipe(recipe: Recipe) -> None:
    planned = plan(recipe())
    assert [(each.name, each.backend, each.d) for each in planned.partitions] == [
        ("inference", "vllm", 4),
        ("training", "archon", 4),
    ]
    batch = planned.batch
    # 32 groups × 4 = 128 samples, 32 a rank; 1280 image + 256 text + 512 new = 2048 tokens would be two in 4096,
    # but train_dataset.max_length cuts prompts at 1024: 1536, two in 4096
    assert (batch.groups, batch.samples, batch.samples_per_rank, batch.micro_batches_per_rank) == (32, 128, 32, 16)
    assert planned.run_id == "geometry3k-grpo-trial0" and planned.device == "cuda"
    assert any("carried" in line for line in planned.warnings)
    assert planned.not_built == []
    assert Plan.from_json(planned.to_json()) == planned


def test_an_unlocked_server_on_a_shared_node_is_warned_of(recipe: Recipe) -> None:
    def warned(*words: str) -> bool:
        return any("without a key" in line for line in plan(recipe("scheduler.type=slurm", *words)).warnings)

    assert warned("allocation_mode=sglang:d4+d4")
    assert not warned("allocation_mode=sglang:d4+d4", "slurm.exclusive=true"), "nobody else is on its nodes"
    assert not warned("allocation_mode=vllm:d4+d4"), "a unix socket in a private directory"
    assert not warned("allocation_mode=sglang:d4+d4", "scheduler.type=local")


def test_an_image_of_the_servers_is_noted(recipe: Recipe) -> None:
    def noted(*words: str) -> list[str]:
        return [line for line in plan(recipe(*words)).notes if "apptainer" in line]

    image = "paths.vllm_container=docker://org/image:v1"
    (line,) = noted("allocation_mode=vllm:d4+d4", image)
    assert line.startswith("vllm servers run in docker://org/image:v1, by apptainer")
    assert noted("allocation_mode=sglang:d4+d4", image) == noted() == []


def test_no_baseline_is_warned_of(recipe: Recipe) -> None:
    def warned(*words: str) -> bool:
        return any("no baseline" in line for line in plan(recipe(*words)).warnings)

    alone = ("gconfig.n_samples=1", "actor.reward_norm=null")
    assert warned(*alone, "actor.adv_norm=null")
    assert not warned(*alone), "adv_norm takes the batch's mean"
    assert not warned("actor.reward_norm=null", "actor.adv_norm=null"), "several answers to a prompt"


@pytest.mark.parametrize("path", ["/nowhere", "./no/rows", "../no-rows", "~/no/rows"])
def test_a_dataset_path_that_is_not_there_is_refused(recipe: Recipe, path: str, tmp_path: Path) -> None:
    rows = f"train_dataset.path={path}", f"valid_dataset.path={path}"
    for emulated in (False, True):
        with pytest.raises(PlanError) as caught:
            settle(recipe(*rows), emulated=emulated)
        assert [problem.key for problem in caught.value.problems] == ["train_dataset.path", "valid_dataset.path"]
        assert f"{path} is not there" in str(caught.value)
    plan(recipe(*rows, "allocation_mode=vllm:d4"))  # servers alone read no rows
    plan(recipe("train_dataset.path=org/name", f"valid_dataset.path={stand_in_rows(tmp_path)}"))


@pytest.mark.parametrize(
    "layout", ["sglang:d2t2+d4", "sglang:d4+fsdp:d4", "sglang:d1p1t1+d4p1t1", "vllm:d2p2 + archon:d2"]
)
def test_layouts_that_run(recipe: Recipe, layout: str) -> None:
    planned = plan(recipe(f"allocation_mode={layout}"))
    assert planned.partition("training") is not None
    inference = planned.partition("inference")
    assert inference is not None and sum(len(node.servers) for node in inference.nodes) == inference.d


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["allocation_mode=vllm:d4p1t1+d5"], "allocation_mode", "wants 4 + 5 = 9 GPUs, the cluster has 8"),
        (["allocation_mode=vllm:d4p1t1+d5"], "train_dataset.batch_size", "128 samples a step"),
        (["allocation_mode=vllm:d0+d4"], "allocation_mode", "at least 1"),
        (["allocation_mode=sglang:d4+d2p2"], "allocation_mode", "training p=2 is known but not built"),
        (["allocation_mode=sglang:d4+d1t3"], "allocation_mode", "training t=3 does not divide 16 attention heads"),
        (["allocation_mode=sglang:d4|d4"], "allocation_mode", "colocation (a|b) is known but not built"),
        (["allocation_mode=sglang:d4+e2d4"], "allocation_mode", "has no experts"),
        (["allocation_mode=sglang:t3+d4"], "allocation_mode", "t=3 does not divide 16 attention heads"),
        (["allocation_mode=sglang:c2d2+d4"], "allocation_mode", "inference has no such dimension"),
        (["allocation_mode=embedded:t2+d4"], "allocation_mode", "the embedded server runs on one device"),
        (["allocation_mode=d4"], "allocation_mode", "type: rl needs an inference partition"),
        (["allocation_mode=sglang[a]:d2+sglang[b]:d2+archon[c]:d4"], "allocation_mode", "second inference partition"),
        (["actor.archon.dp_replicate=3"], "allocation_mode", "d=4 is not a multiple of actor.archon.dp_replicate=3"),
        (["train_dataset.batch_size=31", "gconfig.n_samples=3"], "train_dataset.batch_size", "93 samples a step"),
        (["actor.ppo_n_minibatches=3"], "train_dataset.batch_size", "3 minibatches"),
        (["cluster.gpu_memory_gib=20"], "cluster.gpu_memory_gib", "each training GPU would hold"),
        (["actor.path=Qwen/Qwen2.5-VL-72B-Instruct"], "cluster.gpu_memory_gib", "each inference GPU would hold"),
        (["vllm.max_model_len=1500"], "gconfig.max_new_tokens", "over vllm.max_model_len=1500"),
        (["vllm.max_model_len=200000"], "vllm.max_model_len", "more than the 128000 positions"),
        (["actor.mb_spec.max_tokens_per_mb=1024"], "actor.mb_spec.max_tokens_per_mb", "gives 1280 tokens"),
        (
            ["train_dataset.dataset_kwargs={max_pixels: 13000000}"],
            "train_dataset.dataset_kwargs.max_pixels",
            "12845056",
        ),
        (["valid_dataset.dataset_kwargs={min_pixels: 784}"], "valid_dataset.dataset_kwargs.min_pixels", "3136"),
        (["rollout.consumer_batch_size=16"], "rollout.consumer_batch_size", "train_dataset.batch_size=32"),
        (["gconfig.greedy=true"], "gconfig.greedy", "every answer of a group would be the same"),
        (["gconfig.top_p=0.9"], "gconfig.top_p", "only 1.0 can be trained"),
        (["gconfig.top_k=50"], "gconfig.top_k", "leave it out"),
        (["gconfig.frequency_penalty=0.5"], "gconfig.frequency_penalty", "only 0 can be trained"),
        (["gconfig.temperature=0", "actor.temperature=1.0"], "gconfig.temperature", "0 is greedy"),
        (["deterministic=true"], "deterministic", "only with the embedded backend"),
        (["actor.path=some/model"], "actor.path", "not carried"),
    ],
)
def test_refuses(recipe: Recipe, overrides: list[str], key: str, words: str) -> None:
    found = refused(recipe(*overrides)).problems
    assert any(problem.key == key and words in problem.message for problem in found), found


def test_everything_independent_is_said_at_once(recipe: Recipe) -> None:
    error = refused(
        recipe(
            "allocation_mode=vllm:d4+d5p2",
            "gconfig.top_p=0.5",
            "rollout.consumer_batch_size=1",
            "actor.mb_spec.max_tokens_per_mb=512",
            "vllm.max_model_len=600",
        )
    )
    assert {problem.key for problem in error.problems} == {
        "allocation_mode",
        "train_dataset.batch_size",
        "gconfig.top_p",
        "gconfig.max_new_tokens",
        "rollout.consumer_batch_size",
        "actor.mb_spec.max_tokens_per_mb",
    }
    said = str(error)
    assert "training p=2" in said and "wants 4 + 10 = 14 GPUs" in said


@pytest.mark.parametrize(
    "overrides",
    [
        ["allocation_mode=vllm:d4p1t1+d5"],
        ["allocation_mode=vllm:d0+d4"],
        ["allocation_mode=sglang:d2+archon:d4t2", "cluster.n_nodes=2", "cluster.n_gpus_per_node=4"],
        ["allocation_mode=sglang:d8+d8"],
        ["allocation_mode=sglang:t3+d4p2"],
        ["allocation_mode=sglang:d4|d4"],
        ["allocation_mode=nonsense"],
        ["allocation_mode=d4"],
        ["train_dataset.batch_size=31", "gconfig.n_samples=3"],
        ["actor.ppo_n_minibatches=3"],
        ["actor.path=Qwen/Qwen2.5-VL-7B-Instruct", "allocation_mode=sglang:d7+d1"],
        ["actor.path=Qwen/Qwen2.5-VL-7B-Instruct", "cluster.gpu_memory_gib=40"],
        ["actor.gradient_checkpointing=false", "cluster.gpu_memory_gib=40"],
        ["allocation_mode=sglang:d4+d4t3", "cluster.n_nodes=4"],
    ],
)
def test_every_suggestion_fits(recipe: Recipe, overrides: list[str]) -> None:
    error = refused(recipe(*overrides))
    assert error.fits and f"fits: {error.fits[0]}" in str(error)
    for suggestion in error.fits:
        again = suggestion.split() if "=" in suggestion else [f"allocation_mode={suggestion}"]
        plan(recipe(*overrides, *again))


def test_a_suggestion_stays_near(recipe: Recipe) -> None:
    assert refused(recipe("allocation_mode=vllm:d4p1t1+d5")).fits[0] == "vllm:d4+archon:d4"
    two_nodes = ["allocation_mode=sglang:d8+d8", "cluster.n_nodes=1"]
    assert "cluster.n_nodes=2" in refused(recipe(*two_nodes)).fits


def test_carets_stand_under_the_dims(recipe: Recipe) -> None:
    problem = next(each for each in refused(recipe("allocation_mode=sglang:d4+archon:d2p2")).problems)
    assert problem.pointer.splitlines() == ["    sglang:d4+archon:d2p2", "                     ^^^^"]


@pytest.mark.parametrize(
    ("size", "good", "bad"),
    # heads, kv heads: 16 and 2, 28 and 4, 40 and 8, 64 and 8; kv heads fewer than t repeat
    [
        ("3B", [1, 2, 4, 8, 16], [3, 32]),
        ("7B", [1, 2, 4], [8, 14]),
        ("32B", [1, 2, 4, 8], [16, 5]),
        ("72B", [1, 2, 4, 8, 16], [3]),
    ],
)
def test_training_t_divides_what_it_cuts(recipe: Recipe, size: str, good: list[int], bad: list[int]) -> None:
    shape = carried(f"Qwen/Qwen2.5-VL-{size}-Instruct")
    assert shape is not None
    config = recipe()
    for t in good:
        assert cutting_problems(config, parse(f"sglang:d1+d1t{t}"), shape) == []
    for t in bad:
        assert cutting_problems(config, parse(f"sglang:d1+d1t{t}"), shape), t


@pytest.mark.parametrize(
    ("dims", "style", "fits"),
    # 3B: 16 heads, 2 kv heads; ulysses needs heads/t a multiple of c, kv heads dividing or repeating
    [
        ("c2", "ulysses", True),
        ("c4", "ulysses", True),
        ("c3", "ulysses", False),
        ("t2c16", "ulysses", False),
        ("t2c8", "ulysses", True),
        ("c3", "allgather", True),
    ],
)
def test_training_c_divides_heads_under_ulysses(recipe: Recipe, dims: str, style: str, fits: bool) -> None:
    shape = carried("Qwen/Qwen2.5-VL-3B-Instruct")
    assert shape is not None
    config = recipe(f"actor.archon.cp_style={style}")
    assert (cutting_problems(config, parse(f"sglang:d1+d1{dims}"), shape) == []) == fits


def test_servers_may_repeat_kv_heads(recipe: Recipe) -> None:
    shape = carried("Qwen/Qwen2.5-VL-3B-Instruct")
    assert shape is not None
    assert cutting_problems(recipe(), parse("sglang:t8+d1"), shape) == []


def test_sft_has_only_a_training_partition(recipe: Recipe) -> None:
    changes = ["type=sft", "train_dataset.type=sft", "valid_dataset.type=sft"]
    planned = plan(recipe(*changes, "allocation_mode=d8"))
    assert [each.name for each in planned.partitions] == ["training"]
    assert planned.batch.samples == 32
    error = refused(recipe(*changes, "allocation_mode=sglang:d4+d4"))
    assert "type: sft trains only" in str(error) and error.fits[0].startswith("archon:d")


def test_serving_alone_has_no_batch(recipe: Recipe) -> None:
    planned = plan(recipe("allocation_mode=sglang:d4t2"))
    assert [each.name for each in planned.partitions] == ["inference"]
    assert planned.batch.samples == 0


def test_steps_follow_from_the_rows(recipe: Recipe, tmp_path: Path) -> None:
    pq.write_table(pa.table({"problem": ["a"] * 100, "answer": ["b"] * 100}), tmp_path / "train-00000-of-00001.parquet")
    rows = f"train_dataset.path={tmp_path}"
    assert plan(recipe(rows)).batch.steps == 3 * (100 // 32)
    assert plan(recipe(rows, "total_train_steps=4")).batch.steps == 4
    assert plan(recipe(rows, "train_dataset.drop_last=false")).batch.steps == 3 * 4
    error = refused(recipe(rows, "train_dataset.batch_size=128"))
    assert "more than the 100 rows" in str(error)


def test_a_checkpoint_without_a_shard_is_named(recipe: Recipe, tiny: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in tiny.iterdir():
        if path.name != "model-00001-of-00002.safetensors":
            (broken / path.name).write_bytes(path.read_bytes())
    error = refused(recipe(f"actor.path={broken}"))
    assert [problem.key for problem in error.problems] == ["actor.path"]
    assert "model-00001-of-00002.safetensors: this shard is missing" in str(error)


def test_fewer_gpus_than_planned_names_emulate(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    with pytest.raises(PlanError, match=r"wants 8 GPUs of this machine, 3 are visible.*--emulate"):
        require_gpus(plan(recipe()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    require_gpus(plan(recipe()))


def test_settle_refuses_what_is_not_built(recipe: Recipe) -> None:
    with pytest.raises(PlanError) as caught:
        settle(recipe("allocation_mode=sglang:d4+d4", "scheduler.type=ray", "actor.use_lora=true"), emulated=False)
    said = str(caught.value)
    assert "scheduler.type" in said and "actor.use_lora" in said


small = st.sampled_from([1, 1, 1, 2, 3, 4])


@given(d=small, t=small, p=small, td=small, tt=small, tc=small, nodes=small, n_gpus=st.sampled_from([1, 4, 8]))
@settings(max_examples=60, deadline=None)
def test_any_layout_is_planned_or_refused_with_what_fits(
    d: int, t: int, p: int, td: int, tt: int, tc: int, nodes: int, n_gpus: int
) -> None:
    layout = f"vllm:d{d}t{t}p{p}+d{td}t{tt}c{tc}"
    config = changed(recipe_without_cache(), f"cluster.n_nodes={nodes} cluster.n_gpus_per_node={n_gpus}")
    config = changed(config, f"allocation_mode={layout}")
    try:
        planned = plan(config)
    except PlanError as error:
        for suggestion in error.fits:
            plan(changed(config, suggestion if "=" in suggestion else f"allocation_mode={suggestion}"))
    else:
        assert [each.world for each in planned.partitions] == [d * t * p, td * tt * tc]


@cache
def recipe_without_cache() -> Config:
    return load(RECIPE, ["paths.cache=/nonexistent"], on_warning=lambda line: None)


def changed(config: Config, assignments: str) -> Config:
    for assignment in assignments.split():
        key, _, value = assignment.partition("=")
        config = with_value(config, key, yaml.safe_load(value))
    return with_value(config, "rollout.consumer_batch_size", config.train_dataset.batch_size)


def test_every_file_in_configs_is_planned(tiny: Path, tmp_path: Path) -> None:
    configs = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
    assert len(configs) >= 5
    stand_in = stand_in_rows(tmp_path / "rows")
    for path in configs:
        text = path.read_text()
        overrides = [f"paths.cache={tmp_path}"]
        overrides += [f"actor.path={tiny}"] if re.search(r"path: \./runs", text) else []
        rows = ("train", "valid") if "pictures" in text else ()
        overrides += [f"{name}_dataset.path={stand_in}" for name in rows]
        config = load(path, overrides, on_warning=lambda line: None)
        assert plan(config).partitions, path
        settled, planned = settle(config, emulated=True)
        assert planned.device == "cpu" and settled.actor.dtype == "float32", path
