"""Keys of the servers' sections: every flag of the tested versions, nothing else, and nothing that the run sets."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.config import ConfigError, load
from core.config.flags import flags_of

BASE = """
experiment_name: a
trial_name: b
allocation_mode: vllm:d1+d1
train_dataset: {path: x, batch_size: 1}
actor: {path: m}
"""


def problems(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "config.yaml"
    file.write_text(BASE + text)
    with pytest.raises(ConfigError) as caught:
        load(file, on_warning=lambda line: None)
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vllm: {enforce_eagre: true}", "did you mean vllm.enforce_eager?"),
        ("vllm: {max_num_batched_token: 1}", "did you mean vllm.max_num_batched_tokens?"),
        ("sglang: {mem_fraction: 0.5}", "did you mean sglang.mem_fraction_static?"),
        ("sglang: {nothing_like_it_at_all: 1}", "another one goes under sglang.extra"),
        ("vllm: {kv_cache_dtype: fp9}", "did you mean fp8?"),
        ("vllm: {enable_expert_parallel: 3}", "wants true or false"),
        ("vllm: {port: 3}", "is set by the run itself"),
        ("sglang: {extra: {api-key: x}}", "is set by the run itself"),
        ("vllm: {swap_space: 8}", "is no flag of the tested versions"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    found = problems(tmp_path, text)
    assert len(found) == 1 and found[0].startswith(f"{tmp_path / 'config.yaml'}:7: ") and said in found[0], found


def test_every_flag_of_the_tested_versions_is_taken_and_read_back(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(BASE + "vllm: {max_num_batched_tokens: 4096, enable_prefix_caching: false, extra: {new-flag: 1}}")
    config = load(file)
    assert config.vllm.model_extra == {"max_num_batched_tokens": 4096, "enable_prefix_caching": False}
    again = tmp_path / "again.yaml"
    again.write_text(config.dump_yaml())
    assert load(again) == config
    overridden = load(file, ["vllm.kv_cache_dtype=fp8"])
    assert overridden.vllm.model_extra is not None and overridden.vllm.model_extra["kv_cache_dtype"] == "fp8"


@pytest.mark.parametrize("backend", ["vllm", "sglang"])
def test_the_lists_are_not_empty_and_say_how_each_flag_is_written(backend: str) -> None:
    known = flags_of(backend)
    assert len(known.names()) > 200 and known.versions
    assert all(known.spelling(name).startswith("--") for name in known.names())
    assert {known.kind(name) for name in known.names()} <= {"switch", "both", "value", "list"}
