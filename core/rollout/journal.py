"""What the rollout service has on disk: logged batches with their images, one line per group, void lines, last publish.

Owns these files and their order of writing (images, batch synced, index lines); what they mean for admission is the
collector's business. Only the service writes them; a batch may be written while older ones are removed.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.rl.trajectory import Group, Sample, TrajectoryError, decode_header, decode_samples, encode_samples
from core.telemetry.files import append_line, read_lines, write_atomic
from core.weights.versions import remove_version, versions

_HEADER_BYTES = 8
_WRITERS = 16


class JournalError(Exception):
    """The journal contradicts what the trainer says, or cannot be read."""


@dataclass
class Journal:
    """`batches`, `images`, `index` and `void` are the run directory's paths of these names."""

    batches: Path
    images: Path
    index: Path
    void: Path
    void_places: set[tuple[int, int]] = field(default_factory=set)
    """(epoch, position) of every void line."""
    _images_of: dict[int, set[str]] = field(default_factory=dict)
    _indexed: set[tuple[int, str]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Of the two above."""

    def open(self) -> None:
        """Reads what is there; torn temporary files of a killed writer go."""
        for directory in (self.batches, self.images):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for torn in directory.glob(".*.tmp"):
                torn.unlink(missing_ok=True)
        self._indexed = {(int(line["batch"]), str(line["group_id"])) for line in read_lines(self.index)}
        self.void_places = {(int(line["epoch"]), int(line["position"])) for line in read_lines(self.void)}
        for step in self.steps():
            with contextlib.suppress(JournalError):  # start_behind finds those that cannot be read
                self._images_of[step] = set(self.header(step).get("images", ()))

    def start_behind(self, step: int) -> int:
        """The last batch that goes on from the trainer's `step` without a gap and can be read.

        One that cannot be read is formed anew, with all that follow it. Where the index stood then is written to
        starts.jsonl, so that the lines of the lost ones can be told from those of their successors.
        """
        formed, wanted = step, self.last_after(step)
        lost: str | None = None
        while formed < wanted and lost is None:
            try:
                self.read_batch(formed + 1)
                formed += 1
            except JournalError as error:
                lost = str(error)
        for dropped in [each for each in self.steps() if each > formed]:
            self.path(dropped).unlink(missing_ok=True)
        if lost is not None:
            print(f"batch {formed + 1} and those behind it are formed anew: {lost}", file=sys.stderr, flush=True)
        lines = len(read_lines(self.index))
        append_line(self.starts, {"time": time.time(), "step": step, "behind": formed, "index_lines": lines})
        self._indexed = {(batch, group) for batch, group in self._indexed if batch <= formed}
        self._images_of = {each: images for each, images in self._images_of.items() if each <= formed}
        return formed

    @property
    def starts(self) -> Path:
        return self.index.with_name("starts.jsonl")

    def steps(self) -> list[int]:
        return sorted(int(path.stem) for path in self.batches.glob("[0-9]*.safetensors"))

    def path(self, step: int) -> Path:
        return self.batches / f"{step:06d}.safetensors"

    def write_batch(
        self, step: int, groups: Sequence[Group], header: Mapping[str, Any], pngs: Mapping[str, bytes]
    ) -> None:
        """Synced when it returns. The index lines follow the batch; restore_index makes up for those torn off."""
        samples = [sample for group in groups for sample in group.samples]
        hashes = sorted({image.hash for sample in samples for image in sample.images})
        with self._lock:
            self._images_of[step] = set(hashes)  # first: what is there already must not be removed with an old batch
        self._write_images({name: pngs[name] for name in hashes if name in pngs})
        body = encode_samples(samples, {**header, "step": step, "images": hashes})
        write_atomic(self.path(step), body)
        with self._lock:
            self._write_index(step, samples, header)

    def _write_images(self, pngs: Mapping[str, bytes]) -> None:
        """Those that are not there yet, synced side by side: a file system commits many as fast as one."""
        new = [(self.images / f"{name}.png", png) for name, png in pngs.items()]
        new = [(path, png) for path, png in new if not path.exists()]
        if new:
            with ThreadPoolExecutor(_WRITERS) as writers:
                list(writers.map(lambda pair: write_atomic(*pair), new))

    def read_batch(self, step: int) -> tuple[list[Sample], dict[str, Any]]:
        try:
            return decode_samples(self.path(step).read_bytes())
        except FileNotFoundError as error:
            raise JournalError(f"batch {step} is not in {self.batches}; the oldest kept is {self.oldest()}") from error
        except TrajectoryError as error:
            raise JournalError(f"{self.path(step)}: {error}") from error

    def header(self, step: int) -> dict[str, Any]:
        try:
            with self.path(step).open("rb") as file:
                size = file.read(_HEADER_BYTES)
                return decode_header(size + file.read(int.from_bytes(size, "little")))
        except (OSError, TrajectoryError) as error:
            raise JournalError(f"{self.path(step)}: {error}") from error

    def oldest(self) -> int | None:
        return min(self.steps(), default=None)

    def last_after(self, step: int) -> int:
        """The newest batch that follows `step` without a gap; `step` itself where there is none."""
        present = set(self.steps())
        while step + 1 in present:
            step += 1
        return step

    def cursor_after(self, step: int) -> dict[str, Any] | None:
        """Where the data goes on behind batch `step`; raises JournalError when nothing says."""
        if step == 0:
            return {"epoch": 0, "position": 0}
        if self.path(step).exists():
            return self.header(step)["cursor_after"]
        cursors = [line["cursor_after"] for line in read_lines(self.index) if line.get("batch") == step]
        if not cursors:
            raise JournalError(
                f"the trainer is at step {step}, but neither {self.path(step)} nor {self.index} knows where the data "
                "goes on behind it"
            )
        return cursors[-1]

    def restore_index(self, step: int) -> None:
        """Writes the lines of a logged batch that a crash kept from the index."""
        if self.path(step).exists():
            samples, header = self.read_batch(step)
            self._write_index(step, samples, header)

    def write_void(self, record: Mapping[str, Any]) -> None:
        """A place is void once, however often the service is started."""
        place = (int(record["epoch"]), int(record["position"]))
        if place not in self.void_places:
            self.void_places.add(place)
            append_line(self.void, dict(record))

    def retain(self, oldest_step: int) -> None:
        """Removes batches before `oldest_step`, and the images that only they show; none of them is formed again."""
        gone = [step for step in self.steps() if step < oldest_step]
        for step in gone:
            self.path(step).unlink(missing_ok=True)
        with self._lock:
            self._indexed = {(step, group) for step, group in self._indexed if step >= oldest_step}
            shown = set[str]().union(*(self._images_of.pop(step, set()) for step in gone))
            for name in shown.difference(*self._images_of.values()):
                (self.images / f"{name}.png").unlink(missing_ok=True)

    def _write_index(self, step: int, samples: Sequence[Sample], header: Mapping[str, Any]) -> None:
        by_group: dict[str, list[Sample]] = {}
        for sample in samples:
            by_group.setdefault(sample.group_id, []).append(sample)
        for group_id, members in by_group.items():
            if (step, group_id) in self._indexed:
                continue
            self._indexed.add((step, group_id))
            first = members[0]
            versions = [int(version) for sample in members for version in sample.versions]
            append_line(
                self.index,
                {
                    "batch": step,
                    "group_id": group_id,
                    "prompt_id": first.prompt_id,
                    "epoch": first.epoch,
                    "position": int(group_id.split("-")[1]),
                    "started_version": first.started_version,
                    "version_min": min(versions, default=first.started_version),
                    "version_max": max(versions, default=first.started_version),
                    "images": [image.hash for image in first.images],
                    "rewards": [round(sample.reward, 6) for sample in members],
                    "cursor_after": header.get("cursor_after"),
                },
            )


def read_last_publish(batches: Path) -> dict[str, Any] | None:
    """What the trainer published last, so that a restarted service goes on without being told again."""
    try:
        return json.loads((batches.parent / "published.json").read_text())
    except (FileNotFoundError, ValueError):
        return None


def write_last_publish(batches: Path, record: Mapping[str, Any]) -> None:
    write_atomic(batches.parent / "published.json", json.dumps(dict(record)))


def remove_old_versions(weights: Path, in_use: set[str], keep: int) -> list[str]:
    """Removes published versions that nobody reads, once `keep` newer ones exist; returns their names."""
    by_age = versions(weights)
    gone = [name for name in by_age[: max(len(by_age) - keep, 0)] if name not in in_use]
    for name in gone:
        remove_version(weights, name)
    return gone
