"""Whatever stands in a file, loading gives a configuration or problems that each have a place: nothing else."""

import re
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import Config, ConfigError, load_text
from core.config.names import known_keys
from tests.config.conftest import MINIMAL

KEYS = st.sampled_from(known_keys(Config))
WORDS = ["${actor.path}", "${", "${a.b}", "${oc.env:NOPE}", "2e-6", "???", "\\${x}", "${.path}", "${actor}"]
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=6),
    st.sampled_from(
        ["${actor.path}", "${", "${a.b}", "${oc.env:NOPE}", "2e-6", "???", "\\${x}", "${.path}", "${actor}"]
    ),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.one_of(st.text(max_size=6), KEYS), inner, max_size=3)
    ),
    max_leaves=6,
)
PLACE = re.compile(r"(mine\.yaml(:\d+)?|override '(.|\n)*'): ", re.DOTALL)


def judged(text: str, overrides: list[str]) -> None:
    try:
        config = load_text(text, "mine.yaml", overrides, on_warning=lambda line: None)
    except ConfigError as error:
        assert error.problems
        for line in error.problems:
            assert PLACE.match(line), line
    else:
        assert load_text(config.dump_yaml(), "again.yaml") == config


def put(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        below = tree.get(part)
        if not isinstance(below, dict):
            tree[part] = below = {}
        tree = below
    tree[last] = value


@settings(max_examples=60, deadline=None)
@given(changes=st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=4))
def test_any_value_at_any_key(changes: list[tuple[str, Any]]) -> None:
    tree = yaml.safe_load(MINIMAL)
    for key, value in changes:
        put(tree, key, value)
    judged(yaml.safe_dump(tree), [])


@settings(max_examples=60, deadline=None)
@given(changes=st.lists(st.tuples(KEYS, st.one_of(st.text(max_size=12), VALUES.map(yaml.safe_dump))), max_size=3))
def test_any_override(changes: list[tuple[str, str]]) -> None:
    judged(MINIMAL, [f"{key}={value}" for key, value in changes])


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("ab:- \n{}[]&*!'\"#|>?%@`$\t,"), max_size=40))
def test_any_text(text: str) -> None:
    judged(MINIMAL + text, [])


@pytest.mark.parametrize("value", ["${train_dataset}", "${cluster.fileroot}/${trial_name}", "${oc.env:HOME}"])
def test_interpolations_inside_values(value: str) -> None:
    judged(MINIMAL, [f"reward_kwargs={{a: '{value}'}}"])
