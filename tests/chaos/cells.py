"""The cells: which process is broken at which phase, and how. `CI` are the eight that every commit sees."""

from __future__ import annotations

from itertools import product

from tests.chaos.broken_runs import Cell

RANK = (
    "packing", "fetch", "scoring", "forward", "backward", "step", "publishing", "publish-before-rename",
    "publish-after-rename", "checkpoint-data", "checkpoint-metadata", "checkpoint-state", "checkpoint-manifest",
    "checkpoint-renamed", "checkpoint-latest", "waiting", "evaluating",
)  # fmt: skip
ROLLOUT = ("rollout", "reward", "logging a batch", "batch logged", "publish", "loading servers", "evaluation")
SERVER = ("generate", "pause", "load", "loaded")
DATA = ("prompts", "images")

CELLS = [
    *(Cell("rank-0", phase, "kill", 2 if phase in ("forward", "backward", "step") else 1) for phase in RANK),
    *(Cell("rank-0", phase, "stop", 2) for phase in ("fetch", "forward", "backward", "publishing", "checkpoint-data")),
    *(Cell("rank-1", phase, how, 2, ranks=2) for phase in ("forward", "backward") for how in ("kill", "stop")),
    Cell("rank-0", "forward", "cut", 2),
    Cell("rank-1", "backward", "cut", 2, ranks=2),
    *(
        Cell("rollout", phase, how, 1 if phase == "evaluation" else 3)
        for phase, how in product(ROLLOUT, ("kill", "stop"))
    ),
    *(Cell("rollout", phase, "cut", 3) for phase in ("rollout", "logging a batch")),
    *(Cell("server-0", phase, how, 2) for phase, how in product(SERVER, ("kill", "stop"))),
    *(Cell("server-0", phase, "cut", 2) for phase in ("generate", "load")),
    *(Cell("data", phase, how) for phase, how in product(DATA, ("kill", "stop", "cut"))),
    *(Cell("reward-worker", "grading", how, 5) for how in ("kill", "stop")),
    Cell("image-worker", "decoding", "kill"),
    *(Cell("daemon-training-0", "registering", how, 3) for how in ("kill", "stop")),
    *(Cell("daemon-inference-0", "fetch", how, 2) for how in ("kill", "stop")),
    *(
        Cell(process, phase, "kill", 3, deterministic=False)
        for process, phase in (
            ("rank-0", "backward"),
            ("rank-0", "checkpoint-renamed"),
            ("rollout", "rollout"),
            ("rollout", "batch logged"),
            ("server-0", "generate"),
            ("data", "images"),
        )
    ),
]
CI = [
    Cell("rank-0", "backward", "kill", 2),
    Cell("rank-0", "checkpoint-manifest", "kill", 1),
    Cell("rank-1", "forward", "stop", 2, ranks=2),
    Cell("rollout", "logging a batch", "kill", 2),
    Cell("server-0", "generate", "stop", 3),
    Cell("data", "images", "cut", 1),
    Cell("daemon-inference-0", "fetch", "kill", 2),
    Cell("rollout", "rollout", "kill", 3, deterministic=False),
]
