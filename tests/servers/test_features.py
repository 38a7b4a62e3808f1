"""What goes into the tower: each server's own image processor, in its own Python, against the trainer's patches."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from core.data.images import patches
from launcher.servers.environment import python_of
from tests.servers.conftest import BACKENDS, available, configuration, picture

HERE = [backend for backend in BACKENDS if backend != "embedded" and available(backend)]
SIZES = [(37, 53), (113, 29), (200, 90), (28, 28), (301, 199)]
PROGRAM = """
import sys, numpy as np
from PIL import Image
from transformers import AutoImageProcessor
model, out, *files = sys.argv[1:]
found = AutoImageProcessor.from_pretrained(model)(images=[Image.open(f) for f in files], return_tensors="np")
np.savez(out, pixels=found["pixel_values"], grids=found["image_grid_thw"])
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", HERE)
def test_the_servers_processor_leaves_our_pictures_as_they_are(backend: str, model: Path, tmp_path: Path) -> None:
    """Sent at the size that smart_resize wants, they are not resized again: same grids, same values."""
    pictures = [picture(width, height, seed) for seed, (width, height) in enumerate(SIZES)]
    files = [tmp_path / f"{number}.png" for number in range(len(pictures))]
    for file, sent in zip(files, pictures, strict=True):
        file.write_bytes(sent.png())
    python = python_of(backend, configuration(model), "cpu")
    words = [python, "-P", "-c", PROGRAM, str(model), str(tmp_path / "features.npz"), *map(str, files)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = np.load(tmp_path / "features.npz")
    ours = np.concatenate([patches(sent.pixels) for sent in pictures])
    assert theirs["grids"].tolist() == [list(sent.grid_thw) for sent in pictures]
    assert theirs["pixels"].shape == ours.shape and np.abs(theirs["pixels"] - ours).max() <= 1e-5
