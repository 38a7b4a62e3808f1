"""Which client speaks to which backend's servers."""

from __future__ import annotations

from collections.abc import Callable

from core.inference.client import InferenceClient
from core.inference.sglang import SGLangClient
from core.inference.vllm import VLLMClient

CLIENTS: dict[str, Callable[..., InferenceClient]] = {
    "sglang": SGLangClient,
    "embedded": SGLangClient,
    "vllm": VLLMClient,
}
