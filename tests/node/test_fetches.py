"""Fetching through the daemon: once per version and node, only versions of this run, refusals as answers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.rpc.errors import RpcError
from core.weights.manifest import Manifest
from core.weights.publish import publish
from launcher.node.fetches import Fetches


def published(weights: Path, name: str, version: int, tensors: dict[str, torch.Tensor]) -> str:
    aux = weights.parent / "aux"
    aux.mkdir(exist_ok=True, parents=True)
    (aux / "config.json").write_text("{}")
    weights.mkdir(exist_ok=True)
    made = publish(
        weights,
        name,
        tensors,
        aux,
        rank=0,
        world=1,
        gather=lambda mine: [mine],
        barrier=lambda: None,
        version=version,
        generation=0,
        lineage=[(version, 0)],
    )
    return made.digest if isinstance(made, Manifest) else made


@pytest.fixture
def fetches(tmp_path: Path) -> Fetches:
    return Fetches(tmp_path / "weights", tmp_path / "local", visible_secs=0.2)


def both(*calls: Callable[[], Awaitable[Any]]) -> list[Any]:
    async def all_of() -> list[Any]:
        return await asyncio.gather(*(call() for call in calls))

    return asyncio.run(all_of())


def test_a_version_is_fetched_once_for_everybody(fetches: Fetches) -> None:
    digest = published(fetches.weights, "v000001-r0", 1, {"a.weight": torch.arange(12.0).reshape(3, 4)})
    source = fetches.weights / "v000001-r0"
    ask = lambda: fetches.get("v000001-r0", str(source), digest)  # noqa: E731
    first, second = both(ask, ask)
    assert first == second and not first["cached"] and first["bytes"] >= 48
    assert Path(first["path"]) == fetches.local / "v000001-r0"
    shutil.rmtree(source)
    again = asyncio.run(ask())
    assert again["cached"] and again["path"] == first["path"]
    asyncio.run(fetches.release("v000001-r0"))
    assert not Path(first["path"]).exists()


def test_only_versions_of_this_run_are_read(fetches: Fetches, tmp_path: Path) -> None:
    digest = published(tmp_path / "elsewhere", "v000001-r0", 1, {"a": torch.zeros(2)})
    fetches.weights.mkdir()
    elsewhere = tmp_path / "elsewhere" / "v000001-r0"
    (fetches.weights / "v000002-r0").symlink_to(elsewhere)
    for name, path in (
        ("v000001-r0", elsewhere),
        ("v000001-r0", fetches.weights / ".." / "elsewhere" / "v000001-r0"),
        ("v000002-r0", fetches.weights / "v000002-r0"),
        ("..", fetches.weights / ".."),
        ("other", fetches.weights / "v000001-r0"),
    ):
        with pytest.raises(RpcError, match="is not the version") as caught:
            asyncio.run(fetches.get(name, str(path), digest))
        assert caught.value.status == 400
    with pytest.raises(RpcError, match="is not the name of a version"):
        asyncio.run(fetches.release("../weights"))


def test_a_version_that_does_not_match_is_refused_with_its_reason(fetches: Fetches) -> None:
    first = published(fetches.weights, "v000001-r0", 1, {"a": torch.zeros(2)})
    asyncio.run(fetches.get("v000001-r0", str(fetches.weights / "v000001-r0"), first))
    other = published(fetches.weights, "v000002-r0", 2, {"a": torch.zeros(3)})
    with pytest.raises(RpcError, match="a") as caught:
        asyncio.run(fetches.get("v000002-r0", str(fetches.weights / "v000002-r0"), other))
    assert caught.value.status == 409
    good = published(fetches.weights, "v000003-r0", 3, {"a": torch.ones(2)})
    assert asyncio.run(fetches.get("v000003-r0", str(fetches.weights / "v000003-r0"), good))["bytes"] >= 8
