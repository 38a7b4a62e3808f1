"""What the rollout needs of an inference server, whichever backend it is.

Owns the words between core.rollout and a backend's client (core.inference.sglang …): a request, its answer, the ways it
can fail. No transport here.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol


class ServerLostError(Exception):
    """The connection broke, or the server gave no answer: the request may go on elsewhere."""


class ServerRefusedError(Exception):
    """The server answered and said no: sending the same request again will not help."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class LoadRefusedError(Exception):
    """A server did not take a version, or takes it under another name."""


class Images:
    """The PNGs of a prompt, encoded once for all samples of a group and in the way of each backend once."""

    def __init__(self, pngs: Sequence[bytes] = ()) -> None:
        self._pngs = pngs
        self._encoded: dict[str, bytes] = {}

    def __len__(self) -> int:
        return len(self._pngs)

    @cached_property
    def urls(self) -> list[str]:
        return ["data:image/png;base64," + base64.b64encode(png).decode() for png in self._pngs]

    def encoded(self, backend: str, encode: Callable[[list[str]], bytes]) -> bytes:
        if backend not in self._encoded:
            self._encoded[backend] = encode(self.urls)
        return self._encoded[backend]


@dataclass(frozen=True)
class Request:
    """Ids with ONE placeholder per image, the images, and SGLang's names of sampling parameters."""

    rid: str
    input_ids: Sequence[int]
    images: Images
    sampling: dict[str, Any]


@dataclass
class Generation:
    """What was sampled so far; `prompt_ids` are the expanded ones as the server reported them."""

    prompt_ids: list[int] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_matched: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason in ("stop", "length")


class InferenceClient(Protocol):
    """One server. `progress` is called whenever anything arrives from it."""

    url: str

    async def generate_ids(
        self, request: Request, *, stream: bool, partial: Generation | None = None, progress: Callable[[], None] = ...
    ) -> Generation: ...

    async def abort(self, rid: str = "", *, everything: bool = False) -> None: ...

    async def pause(self) -> None: ...

    async def load(self, path: str, version: str) -> None: ...

    async def resume(self) -> None: ...

    async def model_info(self) -> dict[str, Any]: ...

    async def capacity(self) -> int | None: ...

    async def close(self) -> None: ...


_NAMED_VERSION = re.compile(r"v(\d+)-r\d+")


def version_number(name: str | int) -> int:
    """The number in a version's name on a server: v000012-r1 and 12 are both 12; -1 for one that no trainer gave."""
    match = _NAMED_VERSION.fullmatch(str(name))
    text = match.group(1) if match else str(name)
    return int(text) if text.isdecimal() else -1


def spread(spans: list[dict[str, Any]], count: int) -> list[int]:
    """Spans of versions as one version a token; raises where they leave a gap."""
    versions: list[int] = []
    for span in spans:
        if span["start"] != len(versions):
            raise ServerRefusedError(f"weight_versions leave a gap before token {span['start']}: {spans}")
        versions += [version_number(span["version"])] * (span["end"] - span["start"])
    return versions[:count]
