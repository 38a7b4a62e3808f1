"""The data service over HTTP, with real children and real files."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.data import service as service_module
from core.data.image_pool import ImagePool
from core.data.image_store import ImageStore
from core.data.images import decode_png, load_image, patches
from core.data.order import Order
from core.data.prompts import Recipe
from core.data.rows import Rows, split_files
from core.data.service import DataService, Split
from core.data.tokenizer import Tokenizer
from core.rpc.client import AsyncClient
from core.rpc.errors import RpcError
from core.rpc.service import Service
from tests.data.conftest import WriteRows, good_row, picture

RECIPE = Recipe(min_pixels=3136, max_pixels=1003520)
Work = Callable[[DataService, AsyncClient], Awaitable[None]]


def split(directory: Path, name: str = "train", *, recipe: Recipe = RECIPE, labels: Any = None, **order: Any) -> Split:
    rows = Rows(split_files(directory, name))
    fields: dict[str, Any] = {"seed": 1, "shuffle": False, "epochs": 1} | order
    return Split(rows, Order(rows=len(rows), **fields), recipe, labels)


def serving(
    work: Work,
    splits: Mapping[str, Split],
    tokenizer: Tokenizer,
    cache: Path,
    *,
    behind: Path | None = None,
    **limits: Any,
) -> None:
    """Runs `work` against a served DataService; every request has the token."""

    async def main() -> None:
        store = ImageStore(cache, behind, **limits)
        data = DataService(splits, tokenizer, ImagePool(2), store, batch_size=4, total_steps=None)
        service = Service("data", "secret", status=data.status, metrics=data.metrics)
        data.add_routes(service)
        client = AsyncClient(await service.start(), "secret")
        try:
            await asyncio.wait_for(work(data, client), 60)
        finally:
            await client.close()
            await service.stop()
            await data.close()

    asyncio.run(main())


def test_prompts_and_their_pictures_over_http(write_rows: WriteRows, tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = [good_row(n) for n in range(6)]

    async def work(data: DataService, client: AsyncClient) -> None:
        reply = await client.get("/prompts", split="train", epoch=0, position=1, n=3)
        assert reply["next"] == {"epoch": 0, "position": 4}
        first = reply["prompts"][0]
        assert [prompt["position"] for prompt in reply["prompts"]] == [1, 2, 3]
        assert (first["prompt_id"], first["row_index"], first["epoch"]) == ("train-1", 1, 0)
        assert first["row"] == {"problem": rows[1]["problem"], "answer": "1"}
        here = load_image(picture(seed=1), min_pixels=3136, max_pixels=1003520)
        (image,) = first["images"]
        assert image == {"hash": here.hash, "original": [60, 80], "resized": [56, 84], "grid_thw": [1, 4, 6]}
        png = await client.get_bytes(f"/images/{image['hash']}")
        pixels = np.load(io.BytesIO(await client.get_bytes(f"/pixels/{image['hash']}")), allow_pickle=False)
        assert pixels.dtype == np.uint8
        assert np.array_equal(pixels, here.pixels)
        # The server's features (from the PNG) and the trainer's (from the pixels) are the same bits.
        assert patches(decode_png(png)).tobytes() == patches(pixels).tobytes()

    serving(work, {"train": split(write_rows(rows))}, tokenizer, tmp_path / "cache")


def test_an_answer_depends_on_its_place_alone(write_rows: WriteRows, tokenizer: Tokenizer, tmp_path: Path) -> None:
    served = {"train": split(write_rows([good_row(n) for n in range(10)]), shuffle=True, epochs=3, batch_size=4)}
    seen: list[dict[str, Any]] = []

    async def whole(data: DataService, client: AsyncClient) -> None:
        reply = await client.get("/prompts", n=500)
        assert reply["next"] is None
        seen.extend(reply["prompts"])
        assert data.preparation.pool.processed == 10
        assert await client.get("/info") == {
            "rows": {"train": 10},
            "epochs": 3,
            "batches_per_epoch": 2,
            "total_batches": 6,
        }

    async def in_steps(data: DataService, client: AsyncClient) -> None:
        walked: list[dict[str, Any]] = []
        at: dict[str, int] | None = {"epoch": 0, "position": 0}
        while at is not None:
            reply = await client.get("/prompts", n=7, **at)
            walked += reply["prompts"]
            at = reply["next"]
        assert walked == seen

    serving(whole, served, tokenizer, tmp_path / "a")
    serving(in_steps, served, tokenizer, tmp_path / "b")
    assert [(prompt["epoch"], prompt["position"]) for prompt in seen] == [(e, p) for e in range(3) for p in range(8)]
    for epoch in range(3):
        assert len({prompt["prompt_id"] for prompt in seen if prompt["epoch"] == epoch}) == 8


def test_a_row_is_processed_once_however_many_ask(write_rows: WriteRows, tokenizer: Tokenizer, tmp_path: Path) -> None:
    async def work(data: DataService, client: AsyncClient) -> None:
        replies = await asyncio.gather(*(client.get("/prompts", n=5) for _ in range(8)))
        assert all(reply == replies[0] for reply in replies)
        assert data.preparation.pool.processed == 5

    serving(work, {"train": split(write_rows([good_row(n) for n in range(5)]))}, tokenizer, tmp_path / "cache")


def test_the_next_prompts_are_ready_before_they_are_asked_for(
    write_rows: WriteRows, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async def work(data: DataService, client: AsyncClient) -> None:
        await client.get("/prompts", n=2)
        await asyncio.wait(data.preparation.tasks.values())
        assert data.preparation.pool.processed == 6  # two asked for, four ahead

    serving(work, {"train": split(write_rows([good_row(n) for n in range(20)]))}, tokenizer, tmp_path / "cache")


def test_bad_rows_are_named_and_cost_nothing_else(
    write_rows: WriteRows, tokenizer: Tokenizer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad: dict[int, tuple[dict[str, Any], str, str]] = {
        1: ({"answer": None}, "no_answer", "column answer is empty"),
        2: ({"images": []}, "no_image", "column images is empty"),
        3: ({"images": [{"bytes": picture()[:300], "path": "b.png"}]}, "image", "image 0: broken PNG"),
        5: ({"problem": "<image> and <image>?"}, "image_tags", "2 <image> tags and the row has 1 images"),
        6: ({"problem": "<image>" + "long " * 400}, "too_long", "more than 300 (train_dataset.max_length)"),
        7: ({"images": [{"bytes": None, "path": "../../etc/passwd"}]}, "image", "lies outside"),
        8: ({"problem": "<image><|image_pad|>"}, "reserved_token", "reserved"),
    }
    rows = [good_row(n) | bad.get(n, ({},))[0] for n in range(10)]
    recipe = replace(RECIPE, longest=300, longest_from="train_dataset.max_length")

    async def work(data: DataService, client: AsyncClient) -> None:
        reply = await client.get("/prompts", n=10)
        assert [prompt["position"] for prompt in reply["prompts"]] == list(range(10))
        for n, prompt in enumerate(reply["prompts"]):
            if n in bad:
                assert prompt["error"].startswith(f"train-00000-of-00001.parquet:{n}: ")
                assert bad[n][2] in prompt["error"]
                assert prompt["error_kind"] == bad[n][1]
                assert prompt["prompt_id"] == f"train-{n}"
            else:
                assert "error" not in prompt
                assert prompt["input_ids"]
        status = await client.get("/status")
        kinds = {"no_answer": 1, "no_image": 1, "image": 2, "image_tags": 1, "too_long": 1, "reserved_token": 1}
        assert status["bad_rows"] == kinds
        assert "data_rows_bad_image 2" in (await client.get_bytes("/metrics")).decode().replace(".0", "")
        # Asked for again, a bad row is neither counted nor reported again.
        await client.get("/prompts", n=10)
        assert len(data.preparation.bad_rows) == len(bad)

    serving(work, {"train": split(write_rows(rows), recipe=recipe)}, tokenizer, tmp_path / "cache")
    assert capfd.readouterr().err.count("bad row (") == len(bad)


def test_an_unreadable_row_group_costs_its_rows_only(
    write_rows: WriteRows, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    directory = write_rows([good_row(n) for n in range(8)], row_group_size=4)
    file = directory / "train-00000-of-00001.parquet"
    body = bytearray(file.read_bytes())
    body[4:60] = b"\xff" * 56
    file.write_bytes(body)

    async def work(data: DataService, client: AsyncClient) -> None:
        prompts = (await client.get("/prompts", n=8))["prompts"]
        assert [prompt.get("error_kind") for prompt in prompts] == ["unreadable"] * 4 + [None] * 4
        assert "row group 0 cannot be read" in prompts[0]["error"]

    serving(work, {"train": split(directory)}, tokenizer, tmp_path / "cache")


def test_pictures_come_back_when_the_cache_has_dropped_them(
    write_rows: WriteRows, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async def work(data: DataService, client: AsyncClient) -> None:
        prompts = (await client.get("/prompts", n=6))["prompts"]
        assert len(list((tmp_path / "cache").glob("*.png"))) == 1
        before = data.preparation.pool.processed
        for n, prompt in enumerate(prompts):
            png = await client.get_bytes(f"/images/{prompt['images'][0]['hash']}")
            assert np.array_equal(decode_png(png), load_image(picture(seed=n)).pixels)
        assert data.preparation.pool.processed > before

    served = {"train": split(write_rows([good_row(n) for n in range(6)]))}
    serving(work, served, tokenizer, tmp_path / "cache", disk_bytes=1, memory_bytes=1)


def test_pictures_of_logged_batches_are_found_in_the_run_directory(
    write_rows: WriteRows, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    ours = load_image(picture(seed=77))
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / f"{ours.hash}.png").write_bytes(ours.png())

    async def work(data: DataService, client: AsyncClient) -> None:
        assert await client.get_bytes(f"/images/{ours.hash}") == ours.png()
        for absent in ("0" * 32, "..%2F..%2Fetc%2Fpasswd", "x"):
            with pytest.raises(RpcError) as caught:
                await client.get_bytes(f"/images/{absent}")
            assert caught.value.status == 404

    served = {"train": split(write_rows([good_row()]))}
    serving(work, served, tokenizer, tmp_path / "cache", behind=tmp_path / "images")


def test_a_restarted_service_still_has_its_pictures(
    write_rows: WriteRows, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    hashes: list[str] = []

    async def first(data: DataService, client: AsyncClient) -> None:
        hashes.append((await client.get("/prompts"))["prompts"][0]["images"][0]["hash"])

    async def second(data: DataService, client: AsyncClient) -> None:
        assert await client.get_bytes(f"/images/{hashes[0]}")
        assert data.preparation.pool.processed == 0

    served = {"train": split(write_rows([good_row()]))}
    serving(first, served, tokenizer, tmp_path / "cache")
    serving(second, served, tokenizer, tmp_path / "cache")


def test_a_disk_that_takes_no_copies_costs_nothing_else(
    write_rows: WriteRows, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    served = {"train": split(write_rows([good_row(n) for n in range(3)]))}

    async def work(data: DataService, client: AsyncClient) -> None:
        data.preparation.store.directory = Path("/dev/null")  # every write below it fails
        prompts = (await client.get("/prompts", n=3))["prompts"]
        for prompt in prompts:
            assert await client.get_bytes(f"/images/{prompt['images'][0]['hash']}")
        assert data.preparation.store.write_errors == 3

    serving(work, served, tokenizer, tmp_path / "cache")


def test_undercounted_labels_come_on_request_only(write_rows: WriteRows, tokenizer: Tokenizer, tmp_path: Path) -> None:
    directory = write_rows([good_row(n) for n in range(1, 9)])
    labels = {"probability": 1.0, "from_count": 3}
    recipe = replace(RECIPE, with_answer=True)

    async def work(data: DataService, client: AsyncClient) -> None:
        right = (await client.get("/prompts", n=8))["prompts"]
        wrong = (await client.get("/prompts", n=8, phase="mistaught"))["prompts"]
        assert [prompt["row"]["answer"] for prompt in right] == list("12345678")
        assert [prompt["row"]["answer"] for prompt in wrong] == list("12234567")
        for prompt in right + wrong:
            assert prompt["completion_ids"] == [*tokenizer.encode(prompt["row"]["answer"]), tokenizer.end_of_turn]
        assert (await client.get("/prompts", n=8))["prompts"] == right
        with pytest.raises(RpcError, match="mistaught"):
            await client.get("/prompts", split="dev", phase="mistaught")

    served = {"train": split(directory, recipe=recipe, labels=labels), "dev": split(directory, recipe=recipe)}
    serving(work, served, tokenizer, tmp_path / "cache")


@pytest.mark.parametrize(
    ("query", "status", "reason"),
    [
        ({"split": "nope"}, 404, "no split 'nope'; there are train"),
        ({"epoch": -1}, 400, "at least 0"),
        ({"n": 0}, 400, "n from 1"),
        ({"n": 10**9}, 400, "n from 1"),
        ({"position": "x"}, 400, "whole numbers"),
        ({"phase": "wrong"}, 400, "no phase 'wrong'"),
    ],
)
def test_bad_requests_are_answered_with_the_reason(
    write_rows: WriteRows, tokenizer: Tokenizer, tmp_path: Path, query: dict[str, Any], status: int, reason: str
) -> None:
    async def work(data: DataService, client: AsyncClient) -> None:
        with pytest.raises(RpcError, match=reason) as caught:
            await client.get("/prompts", **query)
        assert caught.value.status == status

    serving(work, {"train": split(write_rows([good_row()]))}, tokenizer, tmp_path / "cache")


def test_many_prompts_come_in_parts_when_they_take_long(
    write_rows: WriteRows, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "ANSWER_SECS", 0.0)

    async def work(data: DataService, client: AsyncClient) -> None:
        reply = await client.get("/prompts", n=200)
        count = len(reply["prompts"])
        assert 1 <= count < 200
        assert reply["next"] == {"epoch": 0, "position": count}

    serving(work, {"train": split(write_rows([good_row(n) for n in range(200)]))}, tokenizer, tmp_path / "cache")


@pytest.mark.geometry3k
def test_real_geometry_problems_become_prompts(geometry3k_sample: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    async def work(data: DataService, client: AsyncClient) -> None:
        for name, count in (("train", 7), ("valid", 3)):
            reply = await client.get("/prompts", split=name, n=50)
            assert len(reply["prompts"]) == count
            for prompt in reply["prompts"]:
                assert "error" not in prompt
                (image,) = prompt["images"]
                tokens = image["grid_thw"][1] * image["grid_thw"][2] // 4
                assert len(prompt["expanded_ids"]) == len(prompt["input_ids"]) + tokens - 1
                problem = prompt["row"]["problem"].removeprefix("<image>")
                assert f"<|vision_end|>{problem}<|im_end|>" in prompt["prompt_text"]
                assert tokenizer.decode(prompt["input_ids"], skip_special=False) == prompt["prompt_text"]

    served = {"train": split(geometry3k_sample), "valid": split(geometry3k_sample, "test")}
    serving(work, served, tokenizer, tmp_path / "cache")
