"""Clients of inference servers; the embedded engine (which needs torch) is in its own package."""

from core.inference.sglang import SGLangClient
from core.inference.vllm import VLLMClient

__all__ = ["SGLangClient", "VLLMClient"]
