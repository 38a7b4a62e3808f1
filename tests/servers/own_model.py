"""The trainer's own model of a checkpoint, in float32: what it says of tokens that a server sampled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from core.data.images import Picture, image_tokens, patches
from core.data.mrope import mrope_position_ids
from core.ops.packed import PackedBatch
from models.archon.registry import family_of


class OwnModel:
    def __init__(self, directory: Path) -> None:
        family = family_of(directory)
        self.args = family.args.from_pretrained(directory, dtype=torch.float32)
        self.model = family.model(self.args).eval().requires_grad_(False)
        raw = json.loads((directory / "config.json").read_text())
        self.marks: tuple[int, int] = (raw["vision_start_token_id"], raw["vision_end_token_id"])

    def expand(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        counts = iter(image_tokens(picture.grid_thw) for picture in pictures)
        image = self.args.image_token_id
        return [token for one in ids for token in ([one] * next(counts) if one == image else [one])]

    def logits(self, ids: Sequence[int], pictures: Sequence[Picture], output: Sequence[int]) -> torch.Tensor:
        """[output, vocabulary]: of the positions that predict each output token."""
        prompt = self.expand(ids, pictures)
        whole = np.array([*prompt, *output], np.int64)
        grids = [picture.grid_thw for picture in pictures]
        positions = mrope_position_ids(
            whole,
            grids,
            image_token_id=self.args.image_token_id,
            video_token_id=self.args.video_token_id,
            merge=self.args.spatial_merge_size,
            tokens_per_second=self.args.tokens_per_second,
        )
        pixels = [torch.from_numpy(patches(picture.pixels)) for picture in pictures]
        packed = PackedBatch(
            torch.from_numpy(whole),
            torch.from_numpy(positions),
            torch.tensor([0, len(whole)], dtype=torch.int32),
            len(whole),
            torch.cat(pixels) if pixels else None,
            tuple(grids),
        )
        with torch.no_grad():
            logits = self.model(packed).logits_RV
        assert logits is not None
        return logits[len(prompt) - 1 : len(whole) - 1].float()

    def logprobs(
        self,
        ids: Sequence[int],
        pictures: Sequence[Picture],
        output: Sequence[int],
        *,
        temperature: float = 1.0,
        banned: Sequence[int] = (),
        banned_early: Sequence[int] = (),
        early: int = 0,
    ) -> np.ndarray:
        """Of each output token, under the distribution that it was to be drawn from."""
        logits = self.logits(ids, pictures, output) / (temperature or 1.0)
        logits[:, list(banned)] = -torch.inf
        logits[:early, list(banned_early)] = -torch.inf
        logp = torch.log_softmax(logits, dim=-1)
        return logp.gather(1, torch.tensor(output)[:, None])[:, 0].numpy()
