"""What of a server the run may ask through the proxy, and which weights it may be told to load.

Owns the allow-lists and the check of a directory before the server hears of it: vLLM's engine dies of a missing one,
SGLang of a truncated one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.inference.proxy import BodyCheck, RefusedError
from core.weights.errors import WeightsError
from core.weights.manifest import NAME, Manifest, describe, verify

Routes = dict[tuple[str, str], BodyCheck | None]
_SHOWN = 4


class WeightsDirectory:
    """Refuses, with the reason, a directory that is not whole or does not fit the model that is served.

    Hashes were checked when the node fetched it; names, sizes and headers are looked at again.
    """

    def __init__(self, model: Path, root: Path | None = None, links: Path | None = None) -> None:
        """`root`: nothing outside it is loaded. `links`: nothing but by a link there, which every node has."""
        self._model = model
        self._root = root
        self._links = links
        self._served: Mapping[str, tuple[int, ...]] | None = None

    def check(self, path: Any) -> None:
        if not isinstance(path, str) or not path:
            raise RefusedError("the weights' directory must be named")
        directory = Path(path)
        if self._links is not None and not (directory.parent == self._links and directory.is_symlink()):
            raise RefusedError(f"{path} is no link in {self._links}, where every node of this server has its versions")
        if self._root is not None and not directory.resolve().is_relative_to(self._root.resolve()):
            raise RefusedError(f"{path} is not below {self._root}, where this node keeps fetched versions")
        try:
            manifest = Manifest.from_json((directory / NAME).read_bytes(), directory / NAME)
            verify(directory, manifest, "sizes")
            found = {name: shape for name, (shape, _) in describe(directory).items()}
            if self._served is None:
                self._served = {name: shape for name, (shape, _) in describe(self._model).items()}
        except (WeightsError, OSError) as error:
            raise RefusedError(f"{path} is not loaded: {error}") from error
        wrong = [name for name in sorted(self._served.keys() | found) if self._served.get(name) != found.get(name)]
        if wrong:
            said = ", ".join(f"{name} {_shape(self._served, name)} → {_shape(found, name)}" for name in wrong[:_SHOWN])
            raise RefusedError(f"{path} is not loaded: {len(wrong)} tensors differ from the model's: {said}")


def _shape(tensors: Mapping[str, tuple[int, ...]], name: str) -> str:
    return str(list(tensors[name])) if name in tensors else "missing"


def routes(backend: str, weights: WeightsDirectory) -> Routes:
    return {"vllm": _vllm, "sglang": _sglang}[backend](weights)


def _vllm(weights: WeightsDirectory) -> Routes:
    def reload_only(body: dict[str, Any]) -> None:
        """/collective_rpc calls any method of the workers: this one is called, and nothing else."""
        kwargs = body.get("kwargs")
        if body.get("method") != "reload_weights" or set(body) - {"method", "kwargs", "timeout"}:
            raise RefusedError("only reload_weights may be called on the workers")
        if not isinstance(kwargs, dict) or set(kwargs) != {"weights_path"}:
            raise RefusedError("reload_weights takes weights_path here, and nothing else")
        weights.check(kwargs["weights_path"])

    open_ones = (
        *(("GET", path) for path in ("/health", "/version", "/openapi.json", "/v1/models", "/weight_info")),
        *(("GET", path) for path in ("/is_paused", "/metrics", "/load")),
        *(("POST", path) for path in ("/inference/v1/generate", "/v1/completions", "/v1/chat/completions")),
        *(("POST", path) for path in ("/pause", "/resume", "/abort_requests", "/update_weight_version")),
        *(("POST", path) for path in ("/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache")),
    )
    return {**dict.fromkeys(open_ones), ("POST", "/collective_rpc"): reload_only}


def _sglang(weights: WeightsDirectory) -> Routes:
    def whole_directory(body: dict[str, Any]) -> None:
        weights.check(body.get("model_path"))

    open_ones = (
        *(("GET", path) for path in ("/health", "/health_generate", "/model_info", "/get_model_info")),
        *(("GET", path) for path in ("/metrics", "/v1/models", "/server_info", "/get_server_info", "/get_load")),
        *(("POST", path) for path in ("/generate", "/v1/completions", "/v1/chat/completions")),
        *(("POST", path) for path in ("/pause_generation", "/continue_generation", "/abort_request", "/flush_cache")),
    )
    return {**dict.fromkeys(open_ones), ("POST", "/update_weights_from_disk"): whole_directory}
