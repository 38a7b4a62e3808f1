"""A byte-level BPE tokenizer of a few hundred entries that is shaped like Qwen's.

Owns the vocabulary, the merges, the special tokens and the chat template, as files of the hub's layout. Every text
encodes, because all 256 bytes are entries. It is written out by hand instead of trained, so that the same files come
out under every version of the tokenizers library.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)

# Splits as Qwen2's tokenizer does: contractions, letters, single digits, punctuation, line ends, blanks.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# In this order: words of the chat template, of the picture task, and of geometry problems. " help"+"ful" and
# " shape"+"s" stay two tokens, as rarer words do in a real vocabulary.
WORDS = (
    "system", "user", "assistant", "You", " are", " a", " help", "ful", " assistant",
    "How", " many", " red", " green", " blue", " shape", " circle", " square", " triangle",
    "Find", "find", " the", " of", " is", " and", " in", " to", " that", " so", " what", "What",
    " x", " y", " if", "If", " m", " angle", "angle", "frac", "sqrt", "box", "ed", "think", "answer", "Answer",
    " answer", "The", "Use", " for", " line", " with", " area", " perimeter", " length", " radius", " each",
)  # fmt: skip

# Same output as the template that Qwen publishes with Qwen2.5-VL.
CHAT_TEMPLATE = (
    "{%- set images = namespace(count=0) -%}{%- set videos = namespace(count=0) -%}"
    "{%- for message in messages -%}"
    "{%- if loop.first and message['role'] != 'system' -%}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}"
    "{%- set images.count = images.count + 1 -%}"
    "{%- if add_vision_id -%}{{ 'Picture ' ~ images.count ~ ': ' }}{%- endif -%}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif part['type'] == 'video' or 'video' in part -%}"
    "{%- set videos.count = videos.count + 1 -%}"
    "{%- if add_vision_id -%}{{ 'Video ' ~ videos.count ~ ': ' }}{%- endif -%}"
    "{{ '<|vision_start|><|video_pad|><|vision_end|>' }}"
    "{%- elif 'text' in part -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte, in GPT-2's byte-level scheme."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in letters)
    letters.update({byte: chr(256 + n) for n, byte in enumerate(others)})
    return [letters[byte] for byte in range(256)]


def merges_for(words: Iterable[str]) -> list[tuple[str, str]]:
    """Merges after which every word is one entry, joining each word from its left end."""
    alphabet = byte_alphabet()
    merges: list[tuple[str, str]] = []
    for word in words:
        pieces = [alphabet[byte] for byte in word.encode()]
        for pair in merges:
            pieces = _joined(pieces, pair)
        while len(pieces) > 1:
            merges.append((pieces[0], pieces[1]))
            pieces = _joined(pieces, merges[-1])
    return merges


def _joined(pieces: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    at = 0
    while at < len(pieces):
        if tuple(pieces[at : at + 2]) == pair:
            out.append(pair[0] + pair[1])
            at += 2
        else:
            out.append(pieces[at])
            at += 1
    return out


def build(words: Iterable[str] = WORDS) -> tuple[dict[str, int], list[tuple[str, str]], dict[str, int]]:
    """Vocabulary (bytes, then merges), merges, and the ids of the special tokens, which come after the vocabulary."""
    merges = merges_for(words)
    entries = dict.fromkeys([*byte_alphabet(), *(left + right for left, right in merges)])
    vocabulary = {entry: n for n, entry in enumerate(entries)}
    special = {token: len(vocabulary) + n for n, token in enumerate(SPECIAL_TOKENS)}
    return vocabulary, merges, special


def write(directory: Path, *, max_length: int) -> dict[str, int]:
    """Writes tokenizer.json, vocab.json, merges.txt, tokenizer_config.json and chat_template.json.

    Returns the ids of the special tokens.
    """
    vocabulary, merges, special = build()
    added = [
        {"id": n, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for token, n in special.items()
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [" ".join(pair) for pair in merges],
        },
    }
    settings = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {str(entry["id"]): {k: v for k, v in entry.items() if k != "id"} for entry in added},
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token != "<|endoftext|>"],
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": max_length,
        "pad_token": "<|endoftext|>",
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    _write_json(directory / "tokenizer.json", tokenizer)
    _write_json(directory / "vocab.json", vocabulary)
    (directory / "merges.txt").write_text("".join(f"{left} {right}\n" for left, right in merges), encoding="utf-8")
    _write_json(directory / "tokenizer_config.json", settings)
    _write_json(directory / "chat_template.json", {"chat_template": CHAT_TEMPLATE})
    return special


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
