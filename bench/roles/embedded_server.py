"""The embedded server on its core, with answers as long as drawn from a lognormal, whatever the model would say.

A sample's length depends on its sampling seed only, so that two runs over the same prompts have the same lengths.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from concurrent.futures import Future

import numpy as np

from bench.roles.pinning import SERVER_CORE, pin
from core.inference.embedded.engine import Engine
from core.inference.embedded.request import Request, Sampling
from launcher.roles.embedded_server import main

MEDIAN, SIGMA, CAP = 24, 0.8, 6


def drawn_length(seed: int) -> int:
    """Lognormal with median MEDIAN and sigma SIGMA, at most CAP times the median."""
    normal = float(np.random.default_rng(seed).standard_normal())
    return max(1, min(CAP * MEDIAN, round(MEDIAN * math.exp(SIGMA * normal))))


def with_drawn_length(sampling: Sampling) -> Sampling:
    """The same draws, ended by their length alone."""
    length = min(sampling.max_new_tokens, drawn_length(sampling.seed))
    return dataclasses.replace(sampling, max_new_tokens=length, min_new_tokens=0, ignore_eos=True)


def submit(engine: Engine, request: Request) -> Future[None]:
    request.sampling = with_drawn_length(request.sampling)
    return plain_submit(engine, request)


plain_submit = Engine.submit

if __name__ == "__main__":
    pin(SERVER_CORE)
    Engine.submit = submit  # type: ignore[method-assign]
    sys.exit(main())
