"""Answers of logged batches beside their images.

Owns the choice of batches and groups and the bounds on what a page may hold; the codec is core.rl.trajectory's.
"""

import base64
import html
import io
import re
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from core.rl.trajectory import Sample, TrajectoryError, decode_samples
from launcher.run_dir import RunDir

BATCHES, GROUPS, SAMPLES = 3, 3, 8
MAX_SIDE = 320
MAX_IMAGE_BYTES = 64 << 20
_HASH = re.compile(r"[0-9a-f]{16,64}")


def answers_section(run_dir: RunDir) -> str:
    """Groups of the first, the middle and the last batch that is still on disk."""
    parts = []
    for path in chosen(sorted(run_dir.batches.glob("*.safetensors"))):
        try:
            samples, header = decode_samples(path.read_bytes())
        except (OSError, TrajectoryError) as error:
            parts.append(f"<h3>{html.escape(path.name)}</h3><p class='none'>{html.escape(str(error))}</p>")
            continue
        step = header.get("step", path.stem.lstrip("0"))
        parts.append(f"<h3>Step {html.escape(str(step))}</h3>")
        parts += [_group(run_dir, members) for members in groups_of(samples)[:GROUPS]]
    return "".join(parts) or "<p class='none'>no batch is on disk</p>"


def chosen(paths: Sequence[Path]) -> list[Path]:
    if len(paths) <= BATCHES:
        return list(paths)
    return [paths[round(i * (len(paths) - 1) / (BATCHES - 1))] for i in range(BATCHES)]


def groups_of(samples: Sequence[Sample]) -> list[list[Sample]]:
    """In the batch's order; groups whose answers differ in reward first, for they are what is learned from."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return sorted(groups.values(), key=lambda members: len({sample.reward for sample in members}) == 1)


def _group(run_dir: RunDir, members: Sequence[Sample]) -> str:
    first = members[0]
    images = "".join(_image(run_dir.images, image.hash) for image in first.images)
    rows = "".join(
        f"<tr class='{_class(sample)}'><td>{sample.reward:.3g}</td>"
        f"<td><pre>{html.escape(sample.text[:4000])}</pre></td>"
        f"<td>{html.escape(_notes(sample))}</td></tr>"
        for sample in members[:SAMPLES]
    )
    more = f"<p class='none'>and {len(members) - SAMPLES} more</p>" if len(members) > SAMPLES else ""
    return (
        f"<div class='group'><div class='images'>{images}</div><div><p class='ids'>prompt "
        f"{html.escape(first.prompt_id)} · group {html.escape(first.group_id)} · started at version "
        f"{first.started_version}</p><details><summary>prompt</summary><pre>{html.escape(first.prompt_text[:8000])}</pre>"
        f"</details><table><tr><th>reward</th><th>answer</th><th></th></tr>{rows}</table>{more}</div></div>"
    )


def _class(sample: Sample) -> str:
    return "right" if sample.accuracy >= 1 - 1e-6 else "wrong"


def _notes(sample: Sample) -> str:
    notes = [f"{len(sample.sampled_ids)} tokens"]
    if len(sample.versions):
        low, high = int(sample.versions.min()), int(sample.versions.max())
        notes.append(f"version {low}" if low == high else f"versions {low}–{high}")
    if sample.truncated:
        notes.append("truncated")
    if sample.reward_error:
        notes.append(sample.reward_error[:200])
    return ", ".join(notes)


def _image(images: Path, name: str) -> str:
    """The image as a data URI, made smaller when it is large."""
    if not _HASH.fullmatch(name):
        return "<p class='none'>an image with an impossible name</p>"
    path = images / f"{name}.png"
    try:
        if path.stat().st_size > MAX_IMAGE_BYTES:
            return f"<p class='none'>image {name} is larger than a page may hold</p>"
        data = path.read_bytes()
        with Image.open(io.BytesIO(data)) as picture:
            width, height = picture.size
            if max(width, height) > MAX_SIDE:
                picture.thumbnail((MAX_SIDE, MAX_SIDE))
                small = io.BytesIO()
                picture.convert("RGB").save(small, "PNG", optimize=True)
                data = small.getvalue()
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        return f"<p class='none'>image {name}: {html.escape(str(getattr(error, 'strerror', None) or error))}</p>"
    encoded = base64.b64encode(data).decode()
    return f"<img alt='image {name}, {width}×{height}' src='data:image/png;base64,{encoded}'>"
