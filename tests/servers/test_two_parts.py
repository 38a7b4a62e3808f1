"""One SGLang server in two parts, as over two nodes: the commands that are made for them meet and answer together."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path

import pytest

from core.inference.belongings import segments, unlink
from core.inference.child import environment
from core.inference.client import Generation, Images, Request, ServerLostError, ServerRefusedError
from core.inference.commands import Seat, launch
from core.inference.ports import take_block
from core.inference.sglang import SGLangClient
from launcher.servers.environment import python_of
from tests.servers.conftest import available, configuration
from tests.servers.own_model import OwnModel

START_SECS = 400


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not available("sglang"), reason="no environment of SGLang on this machine")
def test_two_parts_answer_as_one(model: Path, tmp_path: Path) -> None:
    config = configuration(model)
    blocks = [take_block() for _ in range(2)]
    parts: list[subprocess.Popen] = []
    try:
        for rank, block in enumerate(blocks):
            seat = Seat(
                python_of("sglang", config, "cpu"), str(model), "policy", "cpu", blocks[0].first, tensor=2, nodes=2,
                node_rank=rank, head="127.0.0.1",
            )  # fmt: skip
            line = launch("sglang", config, seat)
            words = list(line.argv)
            words[words.index("--port") + 1] = str(block.first)  # on one machine they must not share it
            with (tmp_path / f"{rank}.log").open("w") as log:
                parts.append(subprocess.Popen(words, env=environment(line.env), stdout=log, stderr=log))
        answer = asyncio.run(ask(f"http://127.0.0.1:{blocks[0].first}", parts, tmp_path))
    finally:
        left = {name for part in parts for name in segments(part.pid)}
        for part in parts:
            part.terminate()
        for part in parts:
            part.wait(60)
        unlink(left)
        for block in blocks:
            block.close()
    own = OwnModel(model)
    expected = own.logprobs([5, 6, 7, 8], [], answer.output_ids)
    assert len(answer.output_ids) == 8 and abs(expected - answer.logprobs).max() <= 0.3


def said(logs: Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in sorted(logs.glob("*.log")))


async def ask(url: str, parts: list[subprocess.Popen], logs: Path) -> Generation:
    client = SGLangClient(url)
    deadline = time.monotonic() + START_SECS
    try:
        while True:
            try:
                await client.model_info(timeout=5)
                break
            except (ServerLostError, ServerRefusedError):
                assert all(part.poll() is None for part in parts) and time.monotonic() < deadline, said(logs)
                await asyncio.sleep(0.5)
        sampling = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True}
        return await client.generate_ids(Request("r", [5, 6, 7, 8], Images(), sampling), stream=False)
    finally:
        await client.close()
