"""Thousands of spoiled inputs: each is taken or refused with a message; nothing raises what nobody expects, or dies."""

from __future__ import annotations

import asyncio
import io
import random
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image

from core.config import UserError, load_text
from core.data.order import Place
from launcher.allocation import parse
from launcher.plan import PlanError, plan
from launcher.planning.printing import problems_text
from launcher.roles.data import make_service
from tests.support.runs import ROOT, launcher

pytestmark = pytest.mark.timeout(600)
CONFIGS = ("smoke.yaml", "geometry3k_cpu.yaml", "qwen2_5_vl_3b_geometry3k_grpo.yaml")
ALLOCATIONS = (
    "d8p1t1", "vllm:d4+d4", "vllm:d4p1t1+d4p1t1", "sglang:d1p1t1+d7p1t1", "sglang:d8+d8", "sglang:d4+fsdp:d4",
    "sglang:d1 + fsdp:d1", "sglang:d16+archon:d8", "sglang:d6+archon:d2", "sglang:d4p1t1+megatron:d4p1t1",
    "sglang:d8t4+megatron:(attn:d4p4t2|ffn:d2p4e4)", "embedded:d2+archon:d2t2c2", "sglang:d4+eval", "vllm[a]:d2t2+d4",
)  # fmt: skip
ALPHABET = "dptce0123456789:+|()[] -avllmsgnfr\t,é"
VALUES = (
    None, True, False, 0, 1, -1, 3, 2.5, "x", "", "1e-6", "nan", ".inf", [], [1], {}, {"a": 1}, "${seed}", "${nope.x}",
    "../../etc", "d2", "0x10", 10**30, "\x00", "é" * 50,
)  # fmt: skip


def spoil_text(text: str, draw: random.Random, alphabet: str) -> str:
    """One to three edits of single characters or pieces."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(text) + 1)
        match draw.randrange(4):
            case 0:
                text = text[:at] + draw.choice(alphabet) + text[at:]
            case 1:
                text = text[:at] + text[at + 1 :]
            case 2:
                end = min(len(text), at + draw.randint(1, 12))
                text = text[:at] + text[at:end] * 2 + text[end:]
            case _:
                text = text[:at] + draw.choice(alphabet) + text[at + 1 :]
        text = text or "d"
    return text


def spoil_tree(tree: dict, draw: random.Random) -> dict:
    """Values exchanged, keys misspelt, moved and dropped, anywhere in the tree."""
    for _ in range(draw.randint(1, 3)):
        place = tree
        while True:
            key = draw.choice(list(place)) if place else None
            if key is None or not isinstance(place[key], dict) or not place[key] or draw.random() < 0.3:
                break
            place = place[key]
        match draw.randrange(4):
            case 0 if key is not None:
                place[key] = draw.choice(VALUES)
            case 1 if key is not None:
                place[spoil_text(str(key), draw, "abcdefgh_.")] = place.pop(key)
            case 2 if key is not None:
                del place[key]
            case _:
                place[draw.choice(["seed", "path", "d", "n_samples", "é", ""])] = draw.choice(VALUES)
    return tree


def spoiled_config(number: int) -> str:
    draw = random.Random(number)
    text = (ROOT / "configs" / CONFIGS[number % len(CONFIGS)]).read_text()
    if draw.random() < 0.5:
        return spoil_text(text, draw, "abc:- \n{}[]&*!'\"#|>%@`$\t,0")
    return yaml.safe_dump(spoil_tree(yaml.safe_load(text), draw), allow_unicode=True)


def test_two_thousand_configurations_in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    ends: Counter[str] = Counter()
    for number in range(2000):
        text = spoiled_config(number)
        try:
            config = load_text(text, "spoiled.yaml", [f"paths.cache={tmp_path}"], on_warning=lambda line: None)
            plan(config, emulate=number % 2 == 0, device="cpu")
        except PlanError as error:
            assert problems_text(error, lambda key: "spoiled.yaml").strip()
            ends["refused by plan"] += 1
        except UserError as error:
            assert str(error).strip()
            ends["refused"] += 1
        except Exception as error:
            raise AssertionError(f"configuration {number}: {error!r}\n{text}") from error
        else:
            ends["planned"] += 1
    assert min(ends["planned"], ends["refused"]) > 50, ends


def test_two_thousand_allocation_strings_in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    text = (ROOT / "configs" / CONFIGS[2]).read_text()
    good = load_text(text, "recipe.yaml", [f"paths.cache={tmp_path}"], on_warning=lambda line: None)
    ends: Counter[str] = Counter()
    for number in range(2000):
        draw = random.Random(number)
        words = spoil_text(draw.choice(ALLOCATIONS), draw, ALPHABET)
        try:
            parse(words)
            ends["parsed"] += 1
            plan(good.model_copy(update={"allocation_mode": words}), device="cuda")
        except UserError as error:
            assert str(error).strip(), words
            ends["refused"] += 1
        except Exception as error:
            raise AssertionError(f"{words!r}: {error!r}") from error
        else:
            ends["planned"] += 1
    assert min(ends["parsed"], ends["refused"]) > 100, ends


@pytest.mark.parametrize("start", range(0, 50, 10))
def test_fifty_through_the_command_line(start: int, tmp_path: Path) -> None:
    for number in range(start, start + 10):
        draw = random.Random(number)
        path = tmp_path / f"{number}.yaml"
        words = [f"paths.cache={tmp_path}"]
        if number % 2:
            path.write_bytes(spoiled_config(number).encode("utf-8", "surrogatepass"))
        else:
            path.write_text((ROOT / "configs" / CONFIGS[2]).read_text())
            spoiled = spoil_text(draw.choice(ALLOCATIONS), draw, ALPHABET.replace("\t", ""))
            words.append(f"allocation_mode={spoiled}")
        ended = launcher("plan", str(path), *words, timeout=60)
        assert ended.status in (0, 2), f"{number}: exit {ended.status}\n{ended.err}"
        assert "Traceback" not in ended.err + ended.out, f"{number}: {ended.err}"
        assert ended.status == 0 or ended.err.strip(), number


def pictures(draw: random.Random) -> list[bytes]:
    """One of each format, in colours that are not all the same."""
    found = []
    for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"):
        for mode in ("RGB", "L"):
            body = io.BytesIO()
            size = draw.randint(30, 90), draw.randint(30, 90)
            Image.frombytes(mode, size, draw.randbytes(size[0] * size[1] * len(mode))).save(body, kind)
            found.append(body.getvalue())
    return found


def spoil_bytes(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        match draw.randrange(3):
            case 0:
                changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
            case 1:
                at = draw.randrange(len(changed))
                changed[at : at + draw.randint(1, 32)] = draw.randbytes(draw.randint(0, 32))
            case _:
                del changed[draw.randrange(1, len(changed) + 1) :]
        changed = changed or bytearray(b"\0")
    return bytes(changed)


def spoil_row(row: dict, draw: random.Random, sources: list[bytes]) -> dict:
    image = spoil_bytes(draw.choice(sources), draw) if draw.random() < 0.9 else draw.choice(sources)
    images = [{"bytes": image, "path": None}]
    match draw.randrange(8):
        case 0:
            images = []
        case 1:
            images = images * draw.randint(2, 4)
        case 2:
            images = [{"bytes": None, "path": draw.choice(["../../etc/passwd", "/etc/passwd", "", "a\0b", "x" * 5000])}]
        case 3:
            row = {
                **row,
                "problem": draw.choice([None, "", "<image>" * 50, "\ud83d".encode("utf-8", "replace").decode()]),
            }
        case 4:
            row = {**row, "answer": draw.choice([None, "", "x" * 100_000])}
        case _:
            pass
    return {**row, "images": images}


def test_five_hundred_spoiled_images_and_rows_kill_no_process(tmp_path: Path) -> None:
    """A run's own data process over a set of 500 spoiled rows: each is a prompt or a named error; all workers live."""
    launcher("make-model", str(tmp_path / "tiny"), "--pictures", str(tmp_path / "pictures"), timeout=120).expect()
    draw = random.Random(11)
    sources = pictures(draw)
    table = pq.read_table(tmp_path / "pictures" / "train-00000-of-00001.parquet")
    rows = [spoil_row(table.slice(n % len(table), 1).to_pylist()[0], draw, sources) for n in range(500)]
    spoiled = tmp_path / "spoiled"
    spoiled.mkdir()
    pq.write_table(table.from_pylist(rows, schema=table.schema), spoiled / "train-00000-of-00001.parquet")
    found = read_all(spoiled, tmp_path)
    assert len(found) == 500
    named = [prompt for prompt in found if "error" in prompt]
    assert all(prompt["error"].strip() and "train-00000" in prompt["error"] for prompt in named)
    assert 100 < len(named) < 500, len(named)


def read_all(rows: Path, tmp_path: Path) -> list[dict]:
    """Every prompt of a set, through the data service of a configuration; its children stay the same."""
    text = (ROOT / "configs" / "smoke.yaml").read_text()
    words = [f"train_dataset.path={rows}", f"actor.path={tmp_path / 'tiny'}", "train_dataset.shuffle=false"]
    words += ["valid_dataset=null", "train_dataset.drop_last=false"]
    config = load_text(text, "smoke.yaml", words, on_warning=lambda line: None)

    async def main() -> list[dict]:
        data = make_service(config, "embedded", cache=tmp_path / "cache", run_images=None)
        try:
            found, after = await asyncio.wait_for(data.prompts("train", Place(0, 0), 500), 300)
            assert after is None
            assert data.preparation.pool.killed == 0
            return found
        finally:
            await data.close()

    return asyncio.run(main())
