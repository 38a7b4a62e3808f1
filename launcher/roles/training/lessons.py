"""Supervised rows for the SFT loop: fetched ahead, packed for all ranks, images on the ranks that train them.

Owns the look-ahead (one batch, in a thread, while the one before is trained); labels and order are the data service's.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core.engine.documents import Document, pack_documents
from core.engine.microbatch import Packing, pack
from core.engine.train_engine import Micro
from launcher.roles.training.setup import Session

Place = dict[str, int]
START: Place = {"epoch": 0, "position": 0}
PROMPTS_A_REQUEST = 512


class NoRowsError(Exception):
    """A whole batch of rows could not be used."""


@dataclass(frozen=True)
class Lesson:
    """A batch on one rank."""

    micros: list[Micro]
    documents: list[list[Document]]  # of each micro-batch
    loss_tokens: int  # over all ranks
    tokens: int
    rows: int  # over all ranks
    bad_rows: int
    after: Place | None  # where the data goes on; None = the end


class Lessons:
    """Batches of the training split, one ahead; collective."""

    def __init__(self, session: Session, place: Place | None, phase: str | None) -> None:
        self.session = session
        self.batch_size = session.config.train_dataset.batch_size
        self._thread = ThreadPoolExecutor(2, thread_name_prefix="lessons")
        self._asked: Future[dict[str, Any] | None] | None = None
        self._coming: tuple[dict[str, Any], Future[dict[str, NDArray[np.uint8]]] | None] | None = None
        self.restart(place, phase)

    def restart(self, place: Place | None, phase: str | None) -> None:
        """Goes on from a place under a phase; what was fetched ahead is dropped."""
        self.place, self.phase = place, phase
        self._ask()
        self._coming = self._receive()

    def next(self) -> Lesson | None:
        """The next batch, None at the end."""
        if self._coming is None:
            return None
        batch, pixels = self._coming
        self._coming = self._receive()
        # only the leader of a team has asked for pixels; it shares them here, where ranks are in step
        found = self.session.exchange.share(lambda: None if pixels is None else pixels.result())
        return make_lesson(batch, found, self.session)

    def _ask(self) -> None:
        """Rank 0 fetches the batch at `place` in a thread."""
        if self.session.is_first and self.place is not None:
            self._asked = self._thread.submit(
                fetch_rows, self.session, "train", self.place, self.batch_size, self.phase
            )
        else:
            self._asked = None

    def _receive(self) -> tuple[dict[str, Any], Future[dict[str, NDArray[np.uint8]]] | None] | None:
        """Shares the fetched batch, has its images fetched, and asks for the one behind it."""
        batch = self.session.exchange.broadcast(None if self._asked is None else self._asked.result())
        if batch is None:
            return None
        self.place = batch["after"]
        self._ask()
        leads = self.session.mesh.leads
        return batch, self._thread.submit(own_pixels, batch, self.session) if leads else None


def fetch_rows(
    session: Session, split: str, place: Place, count: int | None, phase: str | None = None
) -> dict[str, Any] | None:
    """Rows of a split from a place (`count` None: all of them), packed for all ranks; None at the end of the data."""
    rows: list[dict[str, Any]] = []
    after: Place | None = place
    while after is not None and (count is None or len(rows) < count):
        wanted = PROMPTS_A_REQUEST if count is None else count - len(rows)
        query = {"split": split, **after, "n": wanted} | ({"phase": phase} if phase else {})
        reply = session.services.get("data", "/prompts", timeout=60.0, **query)
        rows += reply["prompts"]
        after = reply["next"]
    if not rows:
        return None
    good = [row for row in rows if "error" not in row]
    if not good:
        raise NoRowsError(f"{split}: none of {len(rows)} rows can be used; the first: {rows[0]['error']}")
    documents = [
        {
            "name": row["prompt_id"],
            "ids": [*row["expanded_ids"], *row["completion_ids"]],
            "prompt_length": len(row["expanded_ids"]),
            "images": [(image["hash"], tuple(image["grid_thw"])) for image in row["images"]],
        }
        for row in good
    ]
    packing = pack([_document(each).item() for each in documents], ranks=session.mesh.dp_size, limits=session.limits)
    # behind the last of all, too: a run that is resumed for more epochs goes on there
    after = after or {"epoch": rows[-1]["epoch"], "position": rows[-1]["position"] + 1}
    return {"documents": documents, "packing": packing.to_json(), "after": after, "bad": len(rows) - len(good)}


def own_pixels(batch: dict[str, Any], session: Session) -> dict[str, NDArray[np.uint8]]:
    """The images of this rank's part of a batch."""
    numbers = Packing.from_json(batch["packing"]).minibatches[0].samples_of(session.mesh.dp_rank)
    return session.pixels.get(name for i in numbers for name, _ in batch["documents"][i]["images"])


def make_lesson(batch: dict[str, Any], pixels: dict[str, NDArray[np.uint8]], session: Session) -> Lesson:
    """This rank's micro-batches of a batch."""
    minibatch = Packing.from_json(batch["packing"]).minibatches[0]
    everything = batch["documents"]
    own = [[_document(everything[i]) for i in micro] for micro in minibatch.ranks[session.mesh.dp_rank]]
    micros = [_micro(documents, pixels, session, tower) for documents, tower in zip(own, minibatch.tower, strict=True)]
    return Lesson(
        micros,
        own,
        loss_tokens=sum(len(each["ids"]) - each["prompt_length"] for each in everything),
        tokens=sum(len(each["ids"]) for each in everything),
        rows=len(everything),
        bad_rows=batch["bad"],
        after=batch["after"],
    )


def _micro(documents: Sequence[Document], pixels: dict[str, NDArray[np.uint8]], session: Session, tower: bool) -> Micro:
    return Micro(lambda: pack_documents(documents, pixels, session.rules, tower=tower), empty=not documents)


def _document(value: dict[str, Any]) -> Document:
    images = tuple((str(name), (int(t), int(h), int(w))) for name, (t, h, w) in value["images"])
    return Document(value["name"], np.asarray(value["ids"], dtype=np.int64), value["prompt_length"], images)
