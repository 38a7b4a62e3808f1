"""A server that answers the same with grey images is blind, unless its policy is sure of every token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from core.inference.client import Generation, Images, Request
from core.rl.trajectory import ImageRef
from core.rollout.image_check import PROMPTS, BlindServerError, ImageCheck
from core.rollout.pool import ServerPool
from core.rollout.servers import ServerState
from core.rollout.workflow import Prompt

PNG = b"the image"
IMAGE = ImageRef("a" * 32, (28, 28), (28, 28), (1, 2, 2))
PROMPT = Prompt("train-1", 0, 0, [5, 6], [5, 6], (IMAGE,), {}, "")


class Asked:
    """One server whose log-probabilities are `shown` with the image and `grey` without; counts its questions."""

    def __init__(self, shown: float, grey: float) -> None:
        self.questions = 0

        async def generate(request: Request, **_: Any) -> Generation:
            self.questions += 1
            logprob = shown if request.images.urls == Images([PNG]).urls else grey
            return Generation(output_ids=[7] * 8, logprobs=[logprob] * 8, finish_reason="length")

        server = SimpleNamespace(
            name="server-0", url="http://server", state=ServerState.SERVING, served=3, started=1.0, generate=generate
        )

        async def acquire() -> None:
            return None

        pool = SimpleNamespace(servers={"server-0": server}, acquire=acquire)
        self.check = ImageCheck(cast(ServerPool, pool), banned=())

    def prompts(self, count: int) -> None:
        async def ask() -> None:
            for _ in range(count):
                await self.check.before(PROMPT, [PNG])

        asyncio.run(ask())


def test_one_that_sees_is_asked_once() -> None:
    server = Asked(-0.7, -1.9)
    server.prompts(3)
    assert server.questions == 3


def test_one_whose_numbers_do_not_move_is_blind() -> None:
    with pytest.raises(BlindServerError, match="train-1 is answered by server-0"):
        Asked(-0.7, -0.7).prompts(1)


@pytest.mark.parametrize(("count", "questions"), [(1, 3), (3, 9), (PROMPTS + 2, 3 * PROMPTS)])
def test_a_policy_that_is_sure_of_every_token_is_no_verdict(
    count: int, questions: int, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Asked(-1e-6, 0.0)
    server.prompts(count)
    assert server.questions == questions
    assert ("cannot be told" in capsys.readouterr().out) is (count > PROMPTS)


def test_of_a_sure_policy_a_later_prompt_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Asked(-1e-6, 0.0)
    server.prompts(2)
    unsure: Callable[..., Any] = Asked(-0.7, -0.7).check._pool.servers["server-0"].generate
    monkeypatch.setattr(server.check._pool.servers["server-0"], "generate", unsure)
    with pytest.raises(BlindServerError):
        server.prompts(1)


def test_another_start_of_a_server_is_asked_anew() -> None:
    server = Asked(-1e-6, 0.0)
    server.prompts(PROMPTS - 1)
    server.check._pool.servers["server-0"].started = 2.0
    server.prompts(PROMPTS + 2)
    assert server.questions == 3 * (PROMPTS - 1 + PROMPTS)
