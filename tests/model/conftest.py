"""Fixtures of the model's tests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
