"""What a person reads when a configuration is wrong: every problem at once, each with place, key and cure."""

import re
from pathlib import Path

import pytest

from core.config import ConfigError, load


def test_every_problem_is_reported_at_once_with_its_line(problems) -> None:
    found = problems(
        "gconfig:\n  n_samples: many\n  temprature: 0.7\n"
        "rollout:\n  schedule_policy: robin\nsaver:\n  freq_steps: 0\n"
        "weight_sync:\n  keep: true\nseed: 1.5\n",
        ["actor.optimizer.lrr=1e-6", "train_dataset.batch_size=none"],
    )
    assert found == [
        "mine.yaml:9: gconfig.n_samples: wants a whole number; found 'many'",
        "mine.yaml:10: gconfig.temprature: unknown key; did you mean gconfig.temperature?",
        "mine.yaml:12: rollout.schedule_policy: wants one of round_robin; found 'robin'; did you mean round_robin?",
        "mine.yaml:14: saver.freq_steps: wants at least 1; found 0",
        "mine.yaml:16: weight_sync.keep: a number is wanted, not true or false; found true",
        "mine.yaml:17: seed: wants a whole number; found 1.5",
        "override 'train_dataset.batch_size=none': train_dataset.batch_size: wants a whole number; found 'none'",
        "override 'actor.optimizer.lrr=1e-6': actor.optimizer.lrr: unknown key; did you mean actor.optimizer.lr?",
    ]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("actor.dtype=bf16", "wants one of bfloat16, float16, float32, float64; found 'bf16'; did you mean bfloat16?"),
        ("batch_size=3", "unknown key; did you mean train_dataset.batch_size?"),
        ("train_datset.batch_size=3", "unknown key; did you mean train_dataset?"),
        ("+actor.path=x", "unknown key; did you mean actor?"),
        ("gconfig.lr=3", "unknown key; did you mean "),
        ("actor.path.deeper=1", "actor.path is not a section, nothing can be set below it"),
        ("no_equals_sign", "wants key.sub=value"),
        ("=3", "wants key.sub=value"),
        ("actor..path=3", "wants key.sub=value"),
        ("actor.optimizer={lr: 1", "not a YAML value"),
        ("actor.optimizer.lr=fast", "wants a number; found 'fast'"),
        ("actor.optimizer.lr=.nan", "wants a number; found "),
        ("actor.optimizer.lr=-1", "wants at least 0"),
        ("cluster.n_nodes=2.5", "wants a whole number"),
        ("train_dataset.shuffle=perhaps", "wants true or false; found 'perhaps'"),
        ("gconfig.stop=word", "wants a list; found 'word'"),
        ("gconfig=3", "wants a section"),
        ("trial_name=../../etc", "wants letters, digits"),
        ("slurm.time=1day", "slurm.time: wants minutes as 90, 24:00:00 or 1-00:00:00; found '1day'"),
        ("slurm.training.time=24h", "wants minutes as 90, 24:00:00 or 1-00:00:00; found '24h'"),
        ("slurm.mem_per_node=lots", "wants a size as 64G, or 0 for all of the node; found 'lots'"),
        ("slurm.mem_per_gpu=lots", "wants a size as 64G; found 'lots'"),
        ("slurm.mem_per_gpu=0", "slurm.mem_per_gpu: wants a size as 64G; found '0'"),
        ("slurm.partition=g pu", "slurm.partition: wants one word, without spaces; found 'g pu'"),
        ("seed=18446744073709551616", "seed: a number of at most 64 bits is wanted; found 18446744073709551616"),
        ("total_train_steps=1e30", "total_train_steps: "),
        ("seed=-1", "seed: wants at least 0; found -1"),
        ("gconfig.n_samples=1000000000", "gconfig.n_samples: wants at most 65536; found 1000000000"),
        ("cluster.n_nodes=1000000000", "cluster.n_nodes: wants at most 65536"),
        ("actor.mb_spec.max_tokens_per_mb=0", "wants at least 1; found 0"),
        ("train_dataset.dataset_kwargs.max_pixel=4", "did you mean train_dataset.dataset_kwargs.max_pixels?"),
        ("train_dataset.dataset_kwargs.max_pixels=big", "wants a whole number; found 'big'"),
        ("actor.scheduling_spec.0.cpus=4", "did you mean actor.scheduling_spec.0.cpu?"),
        ("actor.path=${actor.pat}", "cannot be resolved: Interpolation key 'actor.pat' not found"),
        ("actor.path=${actor.path}", "cannot be resolved"),
        ("actor.path=", "must be set"),
    ],
)
def test_override_errors_name_the_override(problems, override: str, said: str) -> None:
    found = problems("", [override])
    assert len(found) == 1, found
    assert found[0].startswith(f"override '{override}': ")
    assert said in found[0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("actor: [1\n", "mine.yaml:9: not YAML"),
        ("gconfig:\n\tn_samples: 1\n", "mine.yaml:9: not YAML"),
        ("seed: 1\nseed: 2\n", "mine.yaml:9: seed: written twice"),
        ("seed: !!python/object/apply:os.system ['true']\n", "mine.yaml:8: "),
        ("seed: !!binary aGk=\n", "the tag tag:yaml.org,2002:binary is not allowed here"),
        ("? [a, b]\n: 1\n", "a key must be plain text"),
        ("a: &a [1, *a]\n", "too many YAML aliases"),
    ],
)
def test_broken_text_is_named_with_its_line(problems, text: str, said: str) -> None:
    assert any(said in line for line in problems(text)), problems(text)


def test_aliases_are_bounded(problems) -> None:
    bomb = "reward_kwargs:\n  a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    for level in range(1, 12):
        bomb += f"  a{level}: &a{level} [" + ", ".join([f"*a{level - 1}"] * 10) + "]\n"
    assert any("too many YAML aliases" in line for line in problems(bomb))


def test_deep_nesting_is_refused(problems) -> None:
    assert problems("reward_kwargs: " + "[" * 5000 + "]" * 5000 + "\n")


def test_only_the_cause_is_named_where_other_keys_take_its_value(problems) -> None:
    found = problems(
        "rollout:\n  consumer_batch_size: ${train_dataset.batch_size}\ngconfig:\n  n_samples: 4.5\n",
        ["actor.reward_norm={std_level: group, group_size: '${gconfig.n_samples}'}", "train_dataset.batch_size=-3"],
    )
    assert found == [
        "mine.yaml:11: gconfig.n_samples: wants a whole number; found 4.5",
        "override 'train_dataset.batch_size=-3': train_dataset.batch_size: wants at least 1; found -3",
    ]


def test_a_file_without_an_end_is_refused_after_what_a_configuration_may_have() -> None:
    with pytest.raises(ConfigError, match=r"^/dev/zero: larger than 4 MiB, which no configuration is$"):
        load(Path("/dev/zero"))


def test_missing_required_keys_are_all_named(problems) -> None:
    found = problems("train_dataset:\n  batch_size: 2\n", minimal="")
    assert [line.split(": ", 1)[1] for line in found] == [
        "experiment_name: must be set",
        "trial_name: must be set",
        "train_dataset.path: must be set",
    ]


def test_files_that_cannot_be_read(problems, tmp_path) -> None:
    assert problems("", minimal="- a\n") == ["mine.yaml:1: the top level must be `key: value` lines"]
    (tmp_path / "mine.yaml").unlink(missing_ok=True)


def test_contradictions_between_keys(problems) -> None:
    found = problems(
        "gconfig:\n  n_samples: 1\n  min_new_tokens: 9\n  max_new_tokens: 8\n"
        "reward: no function\nsaver:\n  fileroot: /elsewhere\nvllm:\n  model: another\n",
        [
            "actor.kl_ctl=0.1",
            "actor.temperature=0.5",
            "actor.reward_norm={std_level: group}",
            "actor.overlong_reward_penalty=true",
            "train_dataset.dataset_kwargs={min_pixels: 9, max_pixels: 4}",
        ],
    )
    keys = {re.sub("^override '.*?': ", "x: ", line).split(": ")[1] for line in found}
    assert keys == {
        "gconfig.min_new_tokens",
        "reward",
        "saver.fileroot",
        "vllm.model",
        "actor.kl_ctl",
        "actor.temperature",
        "actor.reward_norm.std_level",
        "actor.overlong_tokens",
        "actor.overlong_penalty_factor",
        "train_dataset.dataset_kwargs.min_pixels",
    }


def test_contradictions_are_found_beside_wrong_keys(problems) -> None:
    found = problems("seed: x\nreward: no function\n")
    assert [line.split(": ")[1] for line in found] == ["seed", "reward"]


def test_secrets_are_not_shown(problems) -> None:
    (found,) = problems("stats_logger: {wandb: {wandb_api_key: [sesame]}}\n")
    assert found == "mine.yaml:8: stats_logger.wandb.wandb_api_key: wants text; found a value that is not shown here"
