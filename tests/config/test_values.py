"""What a value means: numbers as text, text as written, interpolation, overrides, defaults that follow other keys."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import load, load_text
from tests.config.conftest import MINIMAL


@pytest.mark.parametrize("text", ["2e-6", "2E-6", ".000002", "2.0e-06", "'2e-6'", "0.2e-5"])
def test_floats_may_be_spelled_without_a_point(read, text: str) -> None:
    assert read(f"gconfig: {{frequency_penalty: {text}}}\n").gconfig.frequency_penalty == 2e-6
    assert read("", [f"actor.optimizer.lr={text}"]).actor.optimizer.lr == 2e-6


@pytest.mark.parametrize("name", ["007", "1e3", "1.10", "0x10", "1_000", "on", "2026-11-30", "12e"])
def test_text_stays_as_it_is_written(read, name: str) -> None:
    minimal = MINIMAL.replace("trial_name: t0", f"trial_name: {name}")
    assert read(minimal=minimal).trial_name == name
    assert read("", [f"trial_name={name}"]).trial_name == name


@pytest.mark.parametrize("mode", ["on", "off", "auto", "disabled"])
def test_recover_mode_is_not_a_yaml_bool(read, mode: str) -> None:
    assert read(f"recover: {{mode: {mode}}}\n").recover.mode == mode
    assert read("", [f"recover.mode={mode}"]).recover.mode == mode


def test_false_is_expressible_where_true_is_the_default(read) -> None:
    assert read("vllm: {disable_sliding_window: false}\n").vllm.disable_sliding_window is False
    assert read("", ["vllm.disable_sliding_window=false"]).vllm.disable_sliding_window is False


def test_slurm_times_are_not_sexagesimal(read) -> None:
    slurm = read("slurm: {time: 1:30:00, partition: gpu, training: {time: 30:00}}\n").slurm
    assert (slurm.time, slurm.partition) == ("1:30:00", "gpu")
    assert (slurm.of("training").time, slurm.of("inference").time) == ("30:00", "1:30:00")


def test_untyped_values_keep_their_yaml_types(read) -> None:
    config = read("reward_kwargs: {a: 1, b: 1e-3, c: 'x', d: '7', e: true, f: null, g: [1, two]}\n")
    assert config.reward_kwargs == {"a": 1, "b": 1e-3, "c": "x", "d": "7", "e": True, "f": None, "g": [1, "two"]}


def test_interpolation_reaches_written_keys_defaults_and_sections(read) -> None:
    config = read(
        "gconfig: {n_samples: 4}\nref: {path: '${actor.path}', mb_spec: '${actor.mb_spec}'}\n"
        "rollout: {max_concurrent_rollouts: '${gconfig.n_samples}'}\n",
        ["actor.mb_spec.max_tokens_per_mb=99", "seed=${gconfig.max_tokens}", "saver.trial_name=${trial_name}"],
    )
    assert config.ref is not None
    assert config.ref.path == "model"
    assert config.ref.mb_spec.max_tokens_per_mb == 99
    assert config.rollout.max_concurrent_rollouts == 4
    assert config.seed == 32768
    assert config.saver.trial_name == "t0"


def test_interpolation_of_the_environment(read, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH_OF_TEST", "/scratch/me")
    assert read("", ["cluster.fileroot=${oc.env:SCRATCH_OF_TEST}/runs"]).cluster.fileroot == "/scratch/me/runs"


def test_overrides_win_and_the_last_one_counts(read) -> None:
    assert read("seed: 3\n", ["seed=4", "seed=5"]).seed == 5


def test_overrides_reach_lists_and_make_sections(read) -> None:
    config = read(
        "",
        [
            "actor.scheduling_spec=[{cpu: 2}, {cpu: 3}]",
            "actor.scheduling_spec[1].mem=64",
            "ref.kl_ctl=0.2",
            "valid_dataset.path=rows2",
            "gconfig.stop=[a, b]",
            "actor.kl_ctl=0.2",
        ],
    )
    assert [(spec.cpu, spec.mem) for spec in config.actor.scheduling_spec] == [(2, 32), (3, 64)]
    assert config.ref is not None and config.ref.kl_ctl == 0.2 and config.ref.path == "model"
    assert config.valid_dataset is not None and config.valid_dataset.path == "rows2"
    assert config.gconfig.stop == ("a", "b")


def test_defaults_that_follow_other_keys(read) -> None:
    config = read("gconfig: {temperature: 0.7, max_new_tokens: 33}\n", ["train_dataset.batch_size=8"])
    assert config.actor.temperature == 0.7
    assert config.actor.max_new_tokens == 33
    assert config.rollout.consumer_batch_size == 8
    assert config.tokenizer_path == config.rollout.tokenizer_path == "model"
    assert config.actor.kl_ctl == 0.0
    assert config.train_dataset.type == "rl"
    assert read("type: sft\n").train_dataset.type == "sft"
    assert read("", ["ref.path=model"]).actor.kl_ctl == 0.1


def test_dataset_kwargs_are_a_dict_with_its_defaults(read) -> None:
    config = read(
        "type: sft\n",
        ["train_dataset.dataset_kwargs={gate: {accuracy: 0.5}, mistaught: {}, max_pixels: 5e5}"],
    )
    assert config.train_dataset.dataset_kwargs == {
        "min_pixels": 3136,
        "max_pixels": 500000,
        "system_prompt": None,
        "max_rows": None,
        "gate": {"split": "dev", "accuracy": 0.5, "max_steps": 1000, "every": 50},
        "mistaught": {"steps": 250, "probability": 0.65, "from_count": 3},
    }


def test_the_newer_spelling_of_the_importance_cap(read) -> None:
    actor = read("", ["actor.rejection_sampling={level: sequence, action: truncate, upper: 3}"]).actor
    assert (actor.behave_imp_weight_cap, actor.behave_imp_weight_mode) == (3.0, "sequence_truncate")


def test_a_literal_dollar_brace_survives_the_resolved_file(read, tmp_path: Path) -> None:
    config = read(r"reward_kwargs: {pattern: '\${x}'}" + "\n")
    assert config.reward_kwargs == {"pattern": "${x}"}
    resolved = tmp_path / "config.yaml"
    resolved.write_text(config.dump_yaml())
    assert load(resolved, []) == config


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00\r\x85\u2028\u2029"), max_size=20)


@settings(max_examples=40, deadline=None)
@given(
    lr=st.floats(0, 1, allow_nan=False),
    steps=st.one_of(st.none(), st.integers(1, 10**9)),
    words=st.dictionaries(st.sampled_from("abc"), st.one_of(TEXT, st.booleans(), st.integers(), st.none()), max_size=3),
    stop=st.lists(TEXT, max_size=3),
    prompt=TEXT,
)
def test_the_resolved_file_reads_back_equal(lr, steps, words, stop, prompt) -> None:
    config = load_text(MINIMAL, "mine.yaml", [f"actor.optimizer.lr={lr!r}"])
    data = config.model_dump()
    data.update(total_train_steps=steps, reward_kwargs=words)
    data["gconfig"]["stop"] = stop
    data["train_dataset"]["dataset_kwargs"]["system_prompt"] = prompt
    changed = type(config).model_validate(data)
    assert changed.actor.optimizer.lr == lr
    assert load_text(changed.dump_yaml(), "config.yaml") == changed
