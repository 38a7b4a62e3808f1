"""Evaluations through the servers: greedy, beside training, with publishing held, and with shuffled images."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from tests.rollout.stub_run import ROWS, Run, png_of
from tests.rollout.test_service import driven

# right for the even rows, whose "<image>?" the row's number answers
REWARD = """
def even(prompt, completion, prompt_ids, completion_ids, answer, **row):
    return float(int(answer) % 2 == 0)
"""


async def finished(run: Run, identity: str) -> dict:
    result = await run.client.get(f"/evaluations/{identity}", wait=20, timeout=30)
    assert result["done"], result
    return result


def test_every_held_out_row_is_answered_once_and_greedily(tmp_path: Path) -> None:
    (tmp_path / "graded.py").write_text(REWARD)

    async def scenario(run: Run) -> None:
        await run.serve(4, step=0)
        await run.client.post("/evaluate", {"id": "first", "step": 0, "split": "valid", "hold_publishing": False})
        await run.client.post("/evaluate", {"id": "first", "step": 0, "split": "valid", "hold_publishing": False})
        result = await finished(run, "first")
        assert result["rows"] == ROWS and result["failed"] == 1 and result["failures"] == {"bad row": 1}
        assert result["accuracy"] == pytest.approx(6 / ROWS), "a failed row counts as wrong"
        assert result["version_min"] == result["version_max"] == 4
        greedy = [r for s in run.servers for r in s.requests if r["sampling_params"]["temperature"] == 0]
        assert len(greedy) == ROWS - 1

    driven(scenario, tmp_path, "reward=graded:even", "total_train_steps=1", bad=[7])


def test_publishing_is_held_until_the_evaluation_is_done(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(0)
        await run.batch(2)
        await run.publish(1)  # what was published before is what is evaluated
        for server in run.servers:
            server.delay = 0.05
        await run.client.post("/evaluate", {"id": "held", "step": 1, "split": "valid", "hold_publishing": True})
        await run.until(lambda s: s["served"] == 1 and s["evaluating"] == ["held"], "it runs on version 1")
        await run.publish(2)
        result = await finished(run, "held")
        assert (result["version_min"], result["version_max"]) == (1, 1)
        await run.until(lambda s: s["served"] == 2, "the deferred load follows")

    driven(scenario, tmp_path)


def test_without_holding_the_span_of_versions_is_told(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(0)
        await run.batch(2)
        for server in run.servers:
            server.third_token_on = "v000001-r0"
        await run.client.post("/evaluate", {"id": "free", "step": 0, "split": "valid"})
        await run.until(lambda s: any(row["running"] for row in s["servers"].values()), "it runs")
        await run.publish(1)
        result = await finished(run, "free")
        assert (result["version_min"], result["version_max"]) == (0, 1)

    driven(scenario, tmp_path)


def test_the_control_shows_every_prompt_another_rows_image(tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        await run.serve(0)
        await run.client.post("/evaluate", {"id": "control", "step": 0, "split": "valid", "shuffle_images": True})
        result = await finished(run, "control")
        assert result["failed"] == 0 and result["rows"] == ROWS
        shown = {}
        for server in run.servers:
            for request in server.requests:
                if request["sampling_params"]["temperature"] == 0:
                    row = request["input_ids"][-1] - 13
                    shown[row] = base64.b64decode(request["image_data"][0].split(",", 1)[1])
        assert shown == {row: png_of((row + 1) % ROWS) for row in range(ROWS)}

    driven(scenario, tmp_path, "total_train_steps=1")


def test_a_service_that_ends_in_its_middle_has_no_result(tmp_path: Path) -> None:
    """Its trainer asks the next one again."""

    async def scenario(run: Run) -> None:
        await run.serve(0)
        for server in run.servers:
            server.third_token_on = "never"
        await run.client.post("/evaluate", {"id": "cut", "step": 0, "split": "valid", "hold_publishing": False})
        await run.until(lambda s: s["evaluating"] == ["cut"], "it runs")
        run.session.stop()
        assert await run.exit == 0
        assert await run.session.evaluations.result("cut", 0.0) == {"done": False, "rows": 0}

    driven(scenario, tmp_path)
