"""Our reading of a tokenizer's files against transformers' reading of the same files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from core.data.tokenizer import Tokenizer, TokenizerError

IMAGE = {"type": "image"}
TEXT = {"type": "text", "text": "Find {{ x }}.\n\n "}

# What Qwen's published template gives for these.
CONVERSATIONS: list[tuple[list[dict[str, Any]], str]] = [
    (
        [{"role": "user", "content": "Hi"}],
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    (
        [
            {"role": "system", "content": "Count."},
            {"role": "user", "content": [IMAGE, TEXT, {"image": "x", "type": "x"}]},
        ],
        "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
        "Find {{ x }}.\n\n <|vision_start|><|image_pad|><|vision_end|><|im_end|>\n<|im_start|>assistant\n",
    ),
    (
        [
            {"role": "user", "content": [{"type": "video"}]},
            {"role": "assistant", "content": "5"},
            {"role": "user", "content": "Sure?"},
        ],
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|><|video_pad|>"
        "<|vision_end|><|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
]


@pytest.fixture(scope="module")
def reference(tiny_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_path)


@pytest.mark.parametrize(("messages", "expected"), CONVERSATIONS)
def test_conversations_render_as_under_qwens_template(
    tokenizer: Tokenizer, reference: Any, messages: list[dict[str, Any]], expected: str
) -> None:
    assert tokenizer.render(messages) == expected
    assert reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected


@given(
    text=st.text()
    | st.sampled_from(["<|im_end|>x", "don't 12 345\r\n\n a", "\\frac{1}{2}", "日本 é 🙂", "<|image_pad|>" * 3])
)
def test_ids_equal_those_of_transformers_and_come_back(tokenizer: Tokenizer, reference: Any, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids == reference(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special=False) == reference.decode(ids)
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@given(text=st.text(alphabet=st.characters(max_codepoint=0x24F, exclude_categories=["Cs"])))
def test_every_text_encodes(tokenizer: Tokenizer, text: str) -> None:
    import unicodedata

    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == unicodedata.normalize("NFC", text)


def test_ids_beyond_the_vocabulary_decode_to_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([*tokenizer.encode("ab"), 500, 511]) == "ab"


def test_stop_ids_are_those_of_both_files(tokenizer: Tokenizer, tiny_path: Path, tmp_path: Path) -> None:
    end, text_end = tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|endoftext|>")
    assert tokenizer.stop_ids == (end, text_end)
    assert tokenizer.end_of_turn == end
    copy = shutil.copytree(tiny_path, tmp_path / "copy")
    (copy / "generation_config.json").unlink()
    assert Tokenizer(copy).stop_ids == (end,)


def changed(tiny_path: Path, tmp_path: Path) -> Path:
    copy = shutil.copytree(tiny_path, tmp_path / "copy")
    (copy / "chat_template.json").unlink()
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    return copy


def test_the_template_is_found_where_any_of_the_hubs_layouts_has_it(tiny_path: Path, tmp_path: Path) -> None:
    path = changed(tiny_path, tmp_path)
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(TokenizerError, match="no chat template"):
        Tokenizer(path)
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "list {{ messages[0].content }}"}]
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer(path).render(messages) == "list a"
    (path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert Tokenizer(path).render(messages) == "json"
    (path / "chat_template.jinja").write_text("jinja {{ eos_token }}")
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    assert Tokenizer(path).render(messages) == "jinja <|im_end|>"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if %}", "does not parse"),
        ("{{ messages.__class__.__mro__ }}", "fails"),
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ nothing.at.all }}", "fails"),
    ],
)
def test_a_bad_template_is_named(tiny_path: Path, tmp_path: Path, template: str, reason: str) -> None:
    path = changed(tiny_path, tmp_path)
    (path / "chat_template.jinja").write_text(template)
    with pytest.raises(TokenizerError, match=reason):
        Tokenizer(path).render([])


@pytest.mark.parametrize("broken", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_broken_file_is_named(tiny_path: Path, tmp_path: Path, broken: str) -> None:
    copy = shutil.copytree(tiny_path, tmp_path / "copy")
    (copy / broken).write_text("{")
    with pytest.raises(TokenizerError, match=broken):
        Tokenizer(copy)


def test_a_missing_tokenizer_is_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer.json is missing"):
        Tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="no_such_token"):
        tokenizer.token_id("<|no_such_token|>")
