"""Clients of inference servers; the embedded engine (which needs torch) is in its own package."""

from core.inference.sglang import SGLangClient

__all__ = ["SGLangClient"]
