"""Text to ids and back, and messages to text: a checkpoint's tokenizer and chat template, without transformers.

Owns reading of the tokenizer's files; what a prompt is made of is core.data.prompts' business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TokenizerError(Exception):
    """A tokenizer or chat template that cannot be used; the message names the file."""


class Tokenizer:
    """Tokenizer of a checkpoint directory. Raises TokenizerError when a file is missing or broken."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"{file} is missing; tokenizer_path must be a directory with the tokenizer's files")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise TokenizerError(f"{file} cannot be read: {error}") from error
        self._settings = _read_json(self.path / "tokenizer_config.json") or {}
        self._template = self._compiled_template()
        self.stop_ids = self._read_stop_ids()

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
        """Text of a conversation under the chat template."""
        tokens = {name: _content(self._settings.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **tokens)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template of {self.path} fails: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of a text; nothing is added in front or behind. Special tokens in the text are recognised."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids. Rows of the embedding beyond the vocabulary give nothing."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def token_id(self, token: str) -> int:
        """Id of an entry of the vocabulary; raises TokenizerError when there is none."""
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise TokenizerError(f"{self.path} has no token {token!r}; is it a Qwen2-VL family tokenizer?")
        return found

    @property
    def end_of_turn(self) -> int:
        """The id that closes an answer: the tokenizer's eos token, <|im_end|> for Qwen."""
        return self.token_id(_content(self._settings.get("eos_token")) or "<|im_end|>")

    def _compiled_template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise_exception
        text = self._template_text()
        try:
            return environment.from_string(text)
        except jinja2.TemplateError as error:
            raise TokenizerError(f"the chat template of {self.path} does not parse: {error}") from error

    def _template_text(self) -> str:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        found = (_read_json(self.path / "chat_template.json") or {}).get("chat_template")
        found = found or self._settings.get("chat_template")
        if isinstance(found, list):  # several named ones
            found = next((entry["template"] for entry in found if entry.get("name") == "default"), None)
        if not isinstance(found, str):
            raise TokenizerError(
                f"{self.path} has no chat template (chat_template.jinja, chat_template.json or tokenizer_config.json)"
            )
        return found

    def _read_stop_ids(self) -> tuple[int, ...]:
        ids: list[int] = []
        for name in ("generation_config.json", "config.json"):
            value = (_read_json(self.path / name) or {}).get("eos_token_id")
            ids += value if isinstance(value, list) else [] if value is None else [value]
        return tuple(dict.fromkeys(ids or [self.end_of_turn]))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _content(token: object) -> str | None:
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is not a JSON object")
    return value
