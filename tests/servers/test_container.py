"""A container for the servers alone: what is run in it, what it sees, and what is said where it cannot be."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from core.config import Config, load
from core.inference.client import Generation, Images, Request
from core.inference.commands import Launch, launch
from core.inference.container import Container, NoContainerError, directories_of, inside, program
from core.inference.process import ServerProcess, Wanted
from core.inference.vllm import VLLMClient
from launcher.allocation import parse
from launcher.planning.container import container_problems
from launcher.servers.environment import python_of
from tests.servers.conftest import available, configuration, tensors
from tests.servers.own_model import OwnModel
from tests.servers.spanning import PARTS, ask, spanning
from tests.servers.test_commands import RECIPE, recipe, seat
from tests.servers.test_spanning import config_of, stand_in

BINDS = ("/models/m", "/dev/shm/vlm-rl-0/run", "/tmp/torchinductor_0")


def test_the_words_around_a_command() -> None:
    line = Launch(("python3", "-P", "-m", "sglang.launch_server", "--port", "1"), {"A": "b"})
    made = inside(line, Container("/images/sglang.sif", "/usr/bin/apptainer", True, BINDS), "/tmp/own", "/models/m")
    assert " ".join(made.argv) == (
        "/usr/bin/apptainer exec --nv --bind /models/m --bind /dev/shm/vlm-rl-0/run --bind /tmp/torchinductor_0 "
        "--bind /tmp/own /images/sglang.sif python3 -P -m sglang.launch_server --port 1"
    )
    assert made.env == {"A": "b", "PYTHONNOUSERSITE": "1"}, "packages of the home directory are another Python's"
    with pytest.raises(NoContainerError, match="/models/a:b cannot be seen in a container: its name has a colon"):
        Container("/images/sglang.sif", "/usr/bin/apptainer", True, ("/models/a:b",))
    assert "--nv" not in inside(line, Container("docker://x/y", "singularity", False, ())).argv


def test_the_python_is_the_one_inside() -> None:
    where = "paths.vllm_container=docker://vllm/vllm-openai:v0.32.0"
    assert python_of("vllm", recipe(where), "cuda") == "python3"
    assert python_of("vllm", recipe(where, "paths.vllm_python=/opt/env/bin/python"), "cuda") == "/opt/env/bin/python"
    assert python_of("sglang", recipe(where, "paths.sglang_python=/x/python"), "cuda") == "/x/python"
    line = launch("vllm", recipe(where), seat(python=python_of("vllm", recipe(where), "cuda")))
    assert line.argv[:4] == ("python3", "-P", "-m", "vllm.entrypoints.cli.main")


def test_a_model_of_links_is_seen_with_what_they_lead_to(tmp_path: Path) -> None:
    blobs, model = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    model.mkdir(parents=True)
    (blobs / "1").write_text("weights")
    (model / "config.json").write_text("{}")
    assert directories_of(model) == [str(model)]
    (model / "model.safetensors").symlink_to("../../blobs/1")
    assert directories_of(model) == [str(model), str(blobs)]
    (model / "round.json").symlink_to("round.json")
    (model / "gone.json").symlink_to("/nowhere/gone.json")
    assert directories_of(model) == [str(model), str(blobs)]


def test_a_link_that_goes_by_another_link_is_seen_by_both_names(tmp_path: Path) -> None:
    real, model = tmp_path / "scratch" / "store", tmp_path / "model"
    real.mkdir(parents=True)
    model.mkdir()
    (real / "1").write_text("weights")
    (tmp_path / "home").symlink_to("scratch")
    (model / "model.safetensors").symlink_to(tmp_path / "home" / "store" / "1")
    assert directories_of(model) == [str(model), str(tmp_path / "home" / "store"), str(real)]


def test_a_node_without_the_program_says_what_to_do() -> None:
    assert program({"apptainer": "/a", "singularity": "/s"}.get, "/i.sif") == "/a"
    assert program({"singularity": "/s"}.get, "/i.sif") == "/s"
    with pytest.raises(
        NoContainerError, match=r"/i.sif cannot be started: neither apptainer nor singularity .*modules"
    ):
        program({}.get, "/i.sif")


def test_an_image_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    def said(*words: str) -> list[str]:
        config = load(RECIPE, ["allocation_mode=vllm:d4+d4", *words], on_warning=lambda line: None)
        return [str(each) for each in container_problems(config, parse(config.allocation_mode))]

    image = tmp_path / "vllm.sif"
    (line,) = said(f"paths.vllm_container={image}")
    assert line.startswith(f"paths.vllm_container: {image} is not there") and "docker://" in line
    image.touch()
    assert said(f"paths.vllm_container={image}") == said("paths.vllm_container=docker://a/b") == []
    assert said("paths.sglang_container=/nowhere.sif") == [], "nobody asks for it"
    around = ("scheduler.type=slurm", "slurm.container=apptainer", "slurm.container_image=/images/all.sif")
    (line,) = said(f"paths.vllm_container={image}", *around)
    assert "has the whole inference component in an image; leave one of the two out" in line


APPTAINER = """#!{python}
import json, os, sys
words, binds = sys.argv[1:], []
assert words.pop(0) == "exec"
while words[0].startswith("--"):
    assert words[0] == "--bind", words
    binds.append(words[1])
    words = words[2:]
image, *command = words
assert os.path.exists(image) and all(os.path.isdir(each) for each in binds), (image, binds)
with open({log!r}, "a") as log:
    log.write(json.dumps({{"binds": binds, "command": command, "tmp": os.environ["TMPDIR"]}}) + "\\n")
os.execvp(command[0], command)
"""


@pytest.fixture
def apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict]]:
    """A program of that name that runs the command on this machine; gives what it was asked."""
    log, folder = tmp_path / "asked.jsonl", tmp_path / "bin"
    folder.mkdir()
    (folder / "apptainer").write_text(APPTAINER.format(python=sys.executable, log=str(log)))
    (folder / "apptainer").chmod(0o755)
    (tmp_path / "servers.sif").touch()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return lambda: [json.loads(line) for line in log.read_text().splitlines()]


@pytest.mark.timeout(200)
def test_servers_of_a_run_are_started_in_it(tmp_path: Path, model: Path, apptainer: Callable[[], list[dict]]) -> None:
    """Both parts of a server over two nodes, and again after one's role was killed; the server itself stands in."""
    where = {"sglang_container": str(tmp_path / "servers.sif"), "sglang_python": stand_in(tmp_path)}
    (tmp_path / "link").symlink_to(model)
    real = str(model.resolve())

    async def scenario() -> None:
        async with spanning(config_of(tmp_path, tmp_path / "link", **where), "sglang", 60) as run:
            version = run.publish(1, tensors(model), model)
            await run.until_serving(version, 60)
            before = await run.start()
            run.kill(PARTS[1], role=True)
            server = await run.until_serving(version, 90, but=before)
            assert (await ask(server, [5, 6], 4)).versions == [1] * 4
            asked = apptainer()
            ranks = sorted(each["command"][each["command"].index("--node-rank") + 1] for each in asked)
            assert ranks == ["0", "0", "1", "1"]
            for each in asked:
                assert each["command"][0] == where["sglang_python"]
                assert {real, str(run.local), each["tmp"]} < set(each["binds"])
                assert real in each["command"]

    asyncio.run(asyncio.wait_for(scenario(), 180))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not available("vllm"), reason="no environment of vLLM on this machine")
def test_a_real_server_answers_from_it(tmp_path: Path, model: Path, apptainer: Callable[[], list[dict]]) -> None:
    """As far as a program that stands in for Apptainer can show it: what it sees is this machine."""
    config: Config = configuration(model)
    found = shutil.which("apptainer")
    assert found is not None
    container = Container(str(tmp_path / "servers.sif"), found, False, (str(model),))
    wanted = Wanted("vllm", seat(python=python_of("vllm", config, "cpu"), model=str(model), device="cpu"), None, "t")
    server = ServerProcess(
        wanted, lambda place: inside(launch("vllm", config, place), container, place.directory), log=tmp_path / "log"
    )

    async def scenario() -> Generation:
        try:
            client = VLLMClient(await server.start(), "t")
            request = Request(
                "r", [5, 6, 7, 8], Images(), {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}
            )
            answer = await client.generate_ids(request, stream=False)
            await client.close()
            return answer
        finally:
            await server.stop()

    answer = asyncio.run(asyncio.wait_for(scenario(), 550))
    assert abs(OwnModel(model).logprobs([5, 6, 7, 8], [], answer.output_ids) - answer.logprobs).max() <= 0.3
    (asked,) = apptainer()
    assert asked["tmp"] in asked["binds"] and f"{asked['tmp']}/http.sock" in asked["command"]
