"""One server over two nodes: its parts meet, load one path, and start again together."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from core.config import Config
from core.inference.exposure import WeightsDirectory
from core.inference.proxy import RefusedError
from launcher.node import agreed
from launcher.node.guard import remove_tree
from launcher.node.meeting import Act, Meeting, PartReport, broken, next_act
from tests.node.living import processes_naming
from tests.servers.conftest import available, configuration, publish_alone, tensors
from tests.servers.own_model import OwnModel
from tests.servers.spanning import PARTS, ask, spanning

A, B = Meeting("a", "10.0.0.1", 12001), Meeting("b", "10.0.0.1", 12001)


def report(start: str, state: str, part: int = 1) -> PartReport:
    return PartReport(f"server-0-part-{part}", "server-0", part, start, state)


@pytest.mark.parametrize(
    ("meeting", "joined", "running", "act"),
    [
        (None, "", False, Act.WAIT),  # the head has not begun
        (A, "", False, Act.START),
        (A, "a", True, Act.WAIT),
        (A, "a", False, Act.WAIT),  # its process ended in this start: nobody joins it twice
        (B, "a", False, Act.START),
        (B, "a", True, Act.END),  # the head has started again
        (None, "a", True, Act.END),  # the head is gone
    ],
)
def test_a_part_follows_the_starts_of_the_head(meeting: Meeting | None, joined: str, running: bool, act: Act) -> None:
    assert next_act(meeting, joined, running) is act


def test_the_head_ends_when_a_part_of_its_start_has() -> None:
    assert broken("a", [report("a", "up"), report("a", "up", 2)]) is None
    assert broken("a", [report("", "down")]) is None, "it has not come yet"
    assert broken("b", [report("a", "down")]) is None, "that was in the start before"
    assert broken("a", [report("a", "up"), report("a", "down", 2)]) == report("a", "down", 2)
    assert broken("b", [report("b", "down"), report("a", "out", 2)]) == report("a", "out", 2), "no start will have it"


def copy_of(root: Path, node: str, name: str = "v000001-r0") -> Path:
    directory = root / node / name
    directory.mkdir(parents=True)
    (directory / "manifest.json").write_text(node)
    return directory


def test_one_node_letting_go_does_not_take_the_version_from_another(tmp_path: Path) -> None:
    """Two daemons of one machine share the links."""
    first, second = copy_of(tmp_path, "inference-0"), copy_of(tmp_path, "inference-1")
    links = agreed.agreed(first.parent)
    assert agreed.lead_to(links, first) == agreed.lead_to(links, second) == tmp_path / "served" / "v000001-r0"
    link = links / "v000001-r0"
    agreed.let_go(links, second)
    assert not second.exists() and (link / "manifest.json").read_text() == "inference-0"
    agreed.let_go(links, first)
    assert not link.is_symlink() and not first.exists()
    agreed.let_go(links, first)
    agreed.sweep(links)
    assert not links.exists()


def test_the_guard_of_a_killed_daemon_takes_its_links_along(tmp_path: Path) -> None:
    first, second = copy_of(tmp_path / "run", "inference-0"), copy_of(tmp_path / "run", "inference-1")
    link = agreed.lead_to(agreed.agreed(first.parent), first)
    remove_tree(str(second.parent))
    assert (link / "manifest.json").read_text() == "inference-0"
    remove_tree(str(first.parent))
    assert not (tmp_path / "run").exists()


def test_only_links_of_the_run_are_loaded(tmp_path: Path, model: Path) -> None:
    weights = tensors(model)
    copy = publish_alone(tmp_path / "run" / "inference-0", 1, weights, model)
    elsewhere = publish_alone(tmp_path / "other", 1, weights, model)
    links = agreed.agreed(copy.parent)
    check = WeightsDirectory(model, tmp_path / "run", links).check
    check(str(agreed.lead_to(links, copy)))
    with pytest.raises(RefusedError, match="no link in"):
        check(str(copy))  # the other nodes do not have it there
    with pytest.raises(RefusedError, match="no link in"):
        check(str(links / ".." / "inference-0" / copy.name))
    with pytest.raises(RefusedError, match="is not below"):
        check(str(agreed.lead_to(links, elsewhere)))
    with pytest.raises(RefusedError, match="no link in"):
        check(str(links))


def config_of(tmp_path: Path, model: Path, **paths: str) -> Config:
    said = configuration(model).model_dump()
    said["cluster"]["fileroot"] = str(tmp_path)
    said["sglang"]["mem_fraction_static"] = 0.3
    said["paths"] |= paths
    said["rollout"]["setup_timeout"] = 400
    return Config.model_validate(said)


def stand_in(tmp_path: Path) -> str:
    script = tmp_path / "sglang-python"
    program = Path(__file__).with_name("parted_server.py")
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" "$@"\n')
    script.chmod(0o755)
    return str(script)


@pytest.mark.timeout(300)
def test_parts_load_one_path_and_start_again_together(tmp_path: Path, model: Path) -> None:
    """Whichever process of it is killed; the server itself stands in, and never ends when it loses a part."""

    async def scenario() -> None:
        weights = tensors(model)
        async with spanning(config_of(tmp_path, model, sglang_python=stand_in(tmp_path)), "sglang", 60) as run:
            v1 = run.publish(1, weights, model)
            server = await run.until_serving(v1, 60)
            assert len(server.daemons) == 2
            assert (run.local / "served" / v1).resolve().parent.parent == run.local
            assert (await ask(server, [5, 6], 4)).versions == [1] * 4
            v2 = run.publish(2, weights, model)
            await run.until_serving(v2, 60)
            for name in reversed(PARTS):
                before = await run.start()
                run.kill(name)
                server = await run.until_serving(v2, 90, but=before)
                assert (await ask(server, [5, 6], 4)).versions == [2] * 4
            assert "BrokenError: part 1 of server-0 (server-0-part-1) is down" in run.said()
            workers = [line for line in processes_naming(str(model)) if "time.sleep(600)" in line]
            assert len(workers) == 2, "those of the starts before are gone"
        assert not run.local.exists() and not processes_naming(str(run.run_dir.root))
        assert not [line for line in processes_naming(str(model)) if "time.sleep(600)" in line]

    asyncio.run(asyncio.wait_for(scenario(), 280))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("backend", "cut"),
    # vLLM 0.32 on a CPU has no pipeline (seen on one node, too: it never makes its intermediate tensors)
    [each for each in (("sglang", "p2"), ("vllm", "t2")) if available(each[0])],
)
def test_a_real_server_in_two_parts_loads_both_and_comes_back(
    backend: str, cut: str, tmp_path: Path, model: Path, versions: dict[str, Path]
) -> None:
    async def scenario() -> None:
        async with spanning(config_of(tmp_path, model), backend, 400, cut=cut) as run:
            for number, secs in ((1, 60), (2, 60)):
                name = run.publish(number, tensors(versions[f"v{number:06d}-r0"]), model)
                answers(await ask(await run.until_serving(name, secs), [5, 6, 7, 8], 8), versions[name], number)
            before = await run.start()
            run.kill(PARTS[1])
            server = await run.until_serving("v000002-r0", 400, but=before)
            answers(await ask(server, [5, 6, 7, 8], 8), versions["v000002-r0"], 2)
        assert not run.local.exists() and not processes_naming(str(run.run_dir.root))

    def answers(answer, directory: Path, number: int) -> None:  # type: ignore[no-untyped-def]
        expected = OwnModel(directory).logprobs([5, 6, 7, 8], [], answer.output_ids)
        assert answer.versions == [number] * 8
        assert abs(expected - answer.logprobs).max() <= 0.3

    asyncio.run(asyncio.wait_for(scenario(), 880))
