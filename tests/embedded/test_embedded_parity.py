"""What the embedded server answers is what transformers computes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.embedded.harness import Reference, logprobs, picture, serving

VISION = ["vision", "vision_untied"]


def prompts(reference: Reference, rng: np.random.Generator) -> list[tuple[list[int], list[Image.Image]]]:
    """Texts and pictures of many shapes, as they are mixed in one batch."""
    found: list[tuple[list[int], list[Image.Image]]] = [
        (rng.integers(0, 250, length).tolist(), []) for length in (1, 2, 37, 150)
    ]
    if reference.image is None:
        return found
    sizes = [[(84, 84)], [(28, 280)], [(140, 56), (84, 112)], [(252, 196), (56, 56), (56, 84)]]
    for number, shapes in enumerate(sizes):
        ids: list[int] = rng.integers(0, 250, 3 + number).tolist()
        for _ in shapes:
            ids += [reference.image, *rng.integers(0, 250, 4).tolist()]
        found.append((ids, [picture(*shape, seed=number * 10 + i) for i, shape in enumerate(shapes)]))
    return found


@pytest.mark.parametrize("name", [*VISION, "text"])
def test_greedy_tokens_equal_those_of_transformers(checkpoints: dict[str, Path], name: str) -> None:
    reference = Reference(checkpoints[name])
    asked = prompts(reference, np.random.default_rng(0))
    with serving(checkpoints[name], max_running_requests=6) as remote, ThreadPoolExecutor(len(asked)) as clients:
        answers = list(clients.map(lambda p: remote.generate(*p, max_new_tokens=24), asked))
    for (ids, images), answer in zip(asked, answers, strict=True):
        assert answer["output_ids"] == reference.greedy(ids, images, 24), (len(ids), len(images))
        assert answer["prompt_token_ids"] == reference.inputs(ids, images)["input_ids"][0].tolist()


def test_end_of_text_ends_the_answer_as_in_transformers(checkpoints: dict[str, Path]) -> None:
    reference = Reference(checkpoints["text"])
    rng = np.random.default_rng(5)
    ids = rng.integers(0, 250, 12).tolist()
    free = reference.greedy(ids, [], 30, suppress_tokens=list(reference.model.generation_config.eos_token_id))
    stop = free[10]
    first = free.index(stop)
    with serving(checkpoints["text"]) as remote:
        answer = remote.generate(ids, max_new_tokens=30, stop_token_ids=[stop])
        assert answer["output_ids"] == free[: first + 1]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
        late = remote.generate(ids, max_new_tokens=30, stop_token_ids=[stop], min_new_tokens=first + 3)
        banned = [stop, *reference.model.generation_config.eos_token_id]
        assert late["output_ids"][: first + 2] == reference.greedy(ids, [], first + 2, suppress_tokens=banned)
        ignoring = remote.generate(ids, max_new_tokens=20, stop_token_ids=[stop], ignore_eos=True)
        assert len(ignoring["output_ids"]) == 20
        assert ignoring["meta_info"]["finish_reason"] == {"type": "length", "length": 20}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", VISION)
def test_logprobs_are_those_of_the_distribution_sampled_from(
    checkpoints: dict[str, Path], name: str, temperature: float
) -> None:
    reference = Reference(checkpoints[name])
    asked = prompts(reference, np.random.default_rng(1))
    ends = list(reference.model.generation_config.eos_token_id)
    bans, early = [7, 8, 9, 100], 5
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "logit_bias": {str(token): -1e9 for token in [*bans, reference.image, reference.video]},
        "min_new_tokens": early,
        "max_new_tokens": 12,
        "stop_token_ids": [50],
    }
    with serving(checkpoints[name]) as remote, ThreadPoolExecutor(len(asked)) as clients:
        answers = list(
            clients.map(lambda p: remote.generate(*p[1], **sampling, sampling_seed=p[0]), list(enumerate(asked)))
        )
    for (ids, images), answer in zip(asked, answers, strict=True):
        output = answer["output_ids"]
        logits = reference.logits(ids, images, output).double() / temperature
        logits[:, [*bans, reference.image, reference.video]] = -torch.inf
        logits[:early, [*ends, 50]] = -torch.inf
        expected = torch.log_softmax(logits, dim=-1)[torch.arange(len(output)), torch.tensor(output)]
        np.testing.assert_allclose(logprobs(answer), expected.numpy(), atol=1e-5)
        assert len(output) >= early and not set(output) & {*bans, reference.image, reference.video}


def test_greedy_logprobs_are_untempered(checkpoints: dict[str, Path]) -> None:
    reference = Reference(checkpoints["text"])
    with serving(checkpoints["text"]) as remote:
        answer = remote.generate([1, 2, 3], max_new_tokens=5)
    expected = torch.log_softmax(reference.logits([1, 2, 3], [], answer["output_ids"]), dim=-1)
    picked = expected[torch.arange(5), torch.tensor(answer["output_ids"])]
    np.testing.assert_allclose(logprobs(answer), picked.numpy(), atol=1e-5)
