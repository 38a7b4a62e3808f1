"""The schema against AReaL's fields, and the files in configs/."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.config import Config, ConfigError, load, not_built
from core.config.names import known_keys

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = Path(__file__).with_name("every_areal_field.yaml")
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))


def leaves(tree: Any, path: tuple = ()) -> list[tuple[tuple, Any]]:
    if isinstance(tree, dict) and tree:
        return [leaf for key, value in tree.items() for leaf in leaves(value, (*path, key))]
    if isinstance(tree, list) and tree:
        return [leaf for i, value in enumerate(tree) for leaf in leaves(value, (*path, i))]
    return [(path, tree)]


def test_a_file_with_every_field_of_areal_loads() -> None:
    warnings: list[str] = []
    config = load(GOLDEN, [], on_warning=warnings.append)
    assert not_built(config) == []
    assert len(leaves(yaml.safe_load(GOLDEN.read_text()))) > 550
    megatron = [line for line in warnings if "actor.megatron " in line]
    assert len(megatron) == 1 and megatron[0].startswith(f"{GOLDEN}:")


def test_areals_values_are_our_defaults() -> None:
    """A key that the golden file leaves at AReaL's default and one that is not written mean the same."""
    written = load(GOLDEN, [], on_warning=lambda line: None).model_dump()
    text = "actor:\n  path: Qwen/Qwen2.5-VL-3B-Instruct\nref:\n  path: x\nvalid_dataset:\n  path: x\nperf_tracer: {}\n"
    config = Config.model_validate({**yaml.safe_load(text), "experiment_name": "golden", "trial_name": "every-field",
                                    "train_dataset": {"path": "hiyouga/geometry3k"}})  # fmt: skip
    ours = config.model_dump()
    differing = {
        ".".join(map(str, at))
        for at, value in leaves(ours)
        if not _same(value, _at(written, at))
        and at[-1] not in ("experiment_name", "trial_name", "fileroot", "path", "split", "model_path", "model")
    }
    # null where AReaL has a section with its defaults; filled from another key where it is not written
    assert differing == {
        "eval_gconfig",
        "actor.reward_norm",
        "actor.adv_norm",
        "ref.optimizer",
        "ref.reward_norm",
        "ref.adv_norm",
        "actor.max_new_tokens",
        "ref.max_new_tokens",
        "perf_tracer.session_tracer",
    } - ({"ref.optimizer"} if config.ref and config.ref.optimizer else set())


def _at(tree: Any, path: tuple) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _same(ours: Any, theirs: Any) -> bool:
    return ours == theirs


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("actor.megatron.async_save=true", "actor.megatron.async_save"),
        ("actor.megatron.ddp.bucket_size=7", "actor.megatron.ddp.bucket_size"),
        ("rollout.openai.mode=subproc", "rollout.openai.mode"),
        ("scheduler.endpoint=http://x", "scheduler.endpoint"),
        ("actor.is_critic=true", "actor.is_critic"),
        ("actor.optimizer.hysteresis=3", "actor.optimizer.hysteresis"),
        ("stats_logger.trackio.mode=online", "stats_logger.trackio.mode"),
    ],
)
def test_a_foreign_key_off_its_default_is_refused_by_name(override: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(GOLDEN, [override], on_warning=lambda line: None)
    (problem,) = caught.value.problems
    assert problem.startswith(f"override '{override}': {key}: ")
    assert "not supported" in problem


@pytest.mark.parametrize("override", ["actor.megatron=null", "rollout.openai=null", "actor.weight_update_mode=disk"])
def test_a_foreign_key_at_null_or_its_default_is_accepted(override: str) -> None:
    load(GOLDEN, [override], on_warning=lambda line: None)


def test_a_misspelled_foreign_key_gets_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"did you mean actor\.megatron\.async_save\?"):
        load(GOLDEN, ["actor.megatron.asyncsave=false"], on_warning=lambda line: None)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("actor.use_lora=true", "actor.use_lora"),
        ("critic.path=x", "critic"),
        ("actor.use_sapo_loss=true", "actor.use_sapo_loss"),
        ("scheduler.type=ray", "scheduler.type"),
        ("actor.optimizer.type=adam_bf16", "actor.optimizer.type"),
        ("actor.archon.ac_mode=memory_budget", "actor.archon.ac_mode"),
        ("actor.archon.attn_type=tree", "actor.archon.attn_type"),
        ("dynamic_bs=true", "dynamic_bs"),
        ("enable_offload=true", "enable_offload"),
        ("stats_logger.wandb.mode=online", "stats_logger.wandb.mode"),
        ("saver.mode=async", "saver.mode"),
        ("gconfig.use_beam_search=true", "gconfig.use_beam_search"),
        ("perf_tracer.enabled=true", "perf_tracer.enabled"),
        ("rollout.scheduling_strategy.type=colocation", "rollout.scheduling_strategy.type"),
    ],
)
def test_what_is_known_but_not_built_loads_and_is_named(override: str, key: str) -> None:
    config = load(GOLDEN, [override], on_warning=lambda line: None)
    (line,) = not_built(config)
    assert line.startswith(f"{key}: ") and "known but not built" in line


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_without_a_warning_and_reads_back_equal(path: Path, tmp_path: Path) -> None:
    warnings: list[str] = []
    config = load(path, [], on_warning=warnings.append)
    assert warnings == [] and not_built(config) == []
    resolved = tmp_path / "config.yaml"
    resolved.write_text(config.dump_yaml())
    assert load(resolved, [], on_warning=warnings.append) == config
    assert warnings == []


def test_the_recipe_has_the_published_values() -> None:
    config = load(ROOT / "configs" / "qwen2_5_vl_3b_geometry3k_grpo.yaml", [])
    assert config.total_train_epochs == 3
    assert config.allocation_mode == "vllm:d4p1t1+d4p1t1"
    assert config.tokenizer_path == config.actor.path == config.vllm.model == "Qwen/Qwen2.5-VL-3B-Instruct"
    assert (config.rollout.max_concurrent_rollouts, config.rollout.consumer_batch_size) == (256, 32)
    assert (config.rollout.max_head_offpolicyness, config.rollout.dump_to_file) == (4, True)
    assert (config.gconfig.n_samples, config.gconfig.max_new_tokens) == (4, 512)
    actor = config.actor
    assert actor.gradient_checkpointing and actor.recompute_logprob and actor.use_decoupled_loss
    assert (actor.mb_spec.max_tokens_per_mb, actor.optimizer.lr) == (4096, 2e-6)
    assert (actor.eps_clip, actor.reward_scaling, actor.reward_bias, actor.kl_ctl) == (0.4, 10.0, -0.5, 0.0)
    assert (actor.ppo_n_minibatches, actor.behave_imp_weight_cap) == (1, 5.0)
    assert (config.sglang.max_running_requests, config.sglang.context_length) == (64, 32768)
    assert config.sglang.mem_fraction_static == 0.8 and config.sglang.enable_multimodal
    assert config.vllm.max_model_len == 32768 and config.vllm.gpu_memory_utilization == 0.9
    assert config.vllm.disable_sliding_window is False and config.vllm.enable_multimodal
    assert (config.train_dataset.path, config.train_dataset.batch_size) == ("hiyouga/geometry3k", 32)


def test_any_schema_key_may_be_overridden() -> None:
    """Setting a key to the value it has changes nothing, for every key that holds one plain value."""
    config = load(GOLDEN, [], on_warning=lambda line: None)
    values = dict(leaves(config.model_dump(mode="json")))
    scalars = {".".join(map(str, path)): value for path, value in values.items() if not isinstance(value, dict | list)}
    assert len(scalars) > 450
    overrides = [
        f"{key}={yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}" for key, value in scalars.items()
    ]
    assert load(GOLDEN, overrides, on_warning=lambda line: None) == config
    assert {key.split(".")[0] for key in scalars} <= set(known_keys(Config))


def test_the_package_is_torch_free() -> None:
    code = "import sys, core.config; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=False).returncode == 0


def test_a_configuration_is_frozen() -> None:
    config = load(GOLDEN, [], on_warning=lambda line: None)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]
