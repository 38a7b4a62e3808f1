"""The SFT loop: batches of labelled rows through the same engine; with a gate, in two phases.

Owns the order of steps, the gate (train_dataset.dataset_kwargs.gate and .mistaught) and what is saved; rows come from
training.lessons.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from core.engine.optimizer import learning_rate
from core.engine.train_engine import Update
from core.ops.packed import Scores
from core.rl.losses import supervised_loss
from launcher.roles.training.lessons import START, Lesson, Lessons, fetch_rows, make_lesson, own_pixels
from launcher.roles.training.metrics import Record
from launcher.roles.training.periodic import Periodic
from launcher.roles.training.publishing import Publisher
from launcher.roles.training.recovery import Progress, Recovery
from launcher.roles.training.rl import BAD_STEPS_IN_A_ROW, DivergedError
from launcher.roles.training.setup import Session

RIGHT, MISTAUGHT = "right", "mistaught"


class SFTLoop:
    """One generation of ranks over the rest of the run; every rank runs it in step."""

    def __init__(self, session: Session, record: Record) -> None:
        self.session = session
        self.record = record
        info = session.exchange.broadcast(session.services.get("data", "/info") if session.is_first else None)
        kwargs = session.config.train_dataset.dataset_kwargs
        gate, mistaught = kwargs.get("gate"), kwargs.get("mistaught")
        self.gate: dict[str, Any] | None = dict(gate) if gate else None
        self.mistaught: dict[str, Any] | None = dict(mistaught) if mistaught else None
        self.total_steps = int(info["total_batches"])
        if self.gate is not None:
            taught = self.mistaught["steps"] if self.mistaught else 0
            self.total_steps = min(self.total_steps, self.gate["max_steps"] + taught)
        record.total_steps = self.total_steps
        self.saver = Periodic(session.config.saver, info["batches_per_epoch"])
        self.evaluator = Periodic(session.config.evaluator, info["batches_per_epoch"])
        timers = {"saver": self.saver, "evaluator": self.evaluator}
        self.recovery = Recovery(session, record, info["batches_per_epoch"], timers)
        self.publisher = Publisher(session)
        self.progress = Progress()
        self.whole = True  # one update a step: a stop finds the weights of a whole step
        self._held_out: dict[str, Lesson | None] = {}

    def run(self) -> None:
        """Trains to the end of the data, of the steps, or of the second phase. Raises StopRequested on a signal."""
        self._begin()
        place = self.progress.data["place"]
        lessons = Lessons(self.session, place, self._service_phase())
        saved_hub: int | None = None
        self.record.phase("training")
        while self.progress.step < self._last_step():
            started = time.perf_counter()
            self.session.stop.check()
            lesson = lessons.next()
            if lesson is None:
                break
            fetched = time.perf_counter()
            step = self.progress.step + 1
            lr = learning_rate(self.session.config.actor.optimizer, step, self.total_steps)
            update = self._train(lesson, lr)
            self.progress.step = step
            self.progress.data["place"] = lesson.after
            self._judge(update)
            if self._gate_opens(step):
                lessons.restart(lesson.after, self._service_phase())
            if self.session.exchange.broadcast(self.evaluator.due(step)) and self._has_valid():
                self._evaluate("valid")
            self._record(lesson, update, lr, fetched - started, time.perf_counter() - started)
            if self.session.exchange.broadcast(self.saver.due(step)):
                self.publisher.save_hub(step)
                saved_hub = step
            if self.recovery.due(step):
                self.recovery.save(self.progress)
        self._end(saved_hub)

    def _begin(self) -> None:
        self.record.phase("loading")
        self.progress, warnings = self.recovery.load()
        for warning in warnings:
            self.record.note("warning", warning)
        if self.progress.step:
            self.record.note("info", f"goes on from checkpoint step-{self.progress.step}")
        self.publisher.begin(self.progress.step, self.progress.lineage)
        self.progress.lineage = self.publisher.lineage
        self.progress.data = {"place": dict(START), "phase": RIGHT, "opened": None, **self.progress.data}

    def _service_phase(self) -> str | None:
        return MISTAUGHT if self.progress.data["phase"] == MISTAUGHT else None

    def _last_step(self) -> int:
        """Where training ends, as far as it is known now."""
        opened = self.progress.data["opened"]
        if self.gate is None or opened is None:
            return self.total_steps
        return min(self.total_steps, opened + (self.mistaught["steps"] if self.mistaught else 0))

    def _train(self, lesson: Lesson, lr: float) -> Update:
        def loss(j: int, scores: Scores) -> Tensor:
            return supervised_loss(scores.logp_R, lesson.loss_tokens)

        return self.session.engine.train(lesson.micros, loss, lr, self.session.stop.check)

    def _judge(self, update: Update) -> None:
        self.progress.bad_steps = self.progress.bad_steps + 1 if update.skipped else 0
        if update.skipped:
            what = f"loss {update.loss}, gradient norm {update.grad_norm}"
            self.record.note("warning", f"step {self.progress.step} moved nothing: {what}")
            if self.progress.bad_steps >= BAD_STEPS_IN_A_ROW:
                raise DivergedError(
                    f"{self.progress.bad_steps} steps in a row were not finite ({what}); lower actor.optimizer.lr"
                )

    def _gate_opens(self, step: int) -> bool:
        """Whether the first phase ends with this step: the dev set reads well enough, or it has taken too long."""
        if self.gate is None or self.progress.data["opened"] is not None:
            return False
        last = step >= self.gate["max_steps"]
        if not last and step % self.gate["every"]:
            return False
        accuracy = self._evaluate(self.gate["split"], served_as="dev")
        if accuracy < self.gate["accuracy"] and not last:
            return False
        self.progress.data |= {"opened": step, "phase": MISTAUGHT if self.mistaught else RIGHT}
        self.record.note("info", f"the gate opened at step {step}: {self.gate['split']} reads {accuracy:.3f}")
        return True

    def _has_valid(self) -> bool:
        return self.session.config.valid_dataset is not None

    def _evaluate(self, name: str, served_as: str | None = None) -> float:
        """Collective: share of a split's rows whose whole completion is the likeliest, token by token."""
        split = served_as or name
        started = time.perf_counter()
        lesson = self._rows_of(split)
        right = torch.zeros(1, dtype=torch.float64)
        rows = lesson.rows if lesson is not None else 0
        if lesson is not None:
            found = self.session.engine.most_likely(lesson.micros)
            for documents, likely_R in zip(lesson.documents, found, strict=True):
                pieces = likely_R.cpu().split([document.scored for document in documents])
                for document, piece in zip(documents, pieces, strict=True):
                    right += piece.tolist() == document.ids[document.prompt_length :].tolist()
        accuracy = float(self.session.exchange.sum_samples(right)[0]) / max(1, rows)
        step = self.progress.step
        values = {"kind": "eval", "step": step, "name": name, "accuracy": accuracy, "reward_mean": accuracy}
        values |= {"rows": rows, "version_min": step, "version_max": step, "secs": time.perf_counter() - started}
        self.record.event(values)
        return accuracy

    def _rows_of(self, split: str) -> Lesson | None:
        """All rows of a split, fetched and packed once."""
        if split not in self._held_out:
            session = self.session
            fetched = fetch_rows(session, split, START, None) if session.is_first else None
            batch = session.exchange.broadcast(fetched)
            lesson = None
            if batch is not None:
                lesson = make_lesson(batch, session.exchange.share(lambda: own_pixels(batch, session)), session)
            self._held_out[split] = lesson
        return self._held_out[split]

    def _record(self, lesson: Lesson, update: Update, lr: float, fetch_secs: float, secs: float) -> None:
        self.record.step(
            {
                "kind": "sft",
                "step": self.progress.step,
                "loss": update.loss,
                "lr": lr,
                "grad_norm": update.grad_norm,
                "skipped": update.skipped,
                "tokens": lesson.tokens,
                "loss_tokens": lesson.loss_tokens,
                "bad_rows": lesson.bad_rows,
                "tokens_per_s_train": lesson.tokens / secs,
                "phase": self.progress.data["phase"],
                "wait_data_secs": fetch_secs,
                "forward_backward_secs": update.forward_backward_secs,
                "optimizer_secs": update.optimizer_secs,
                "secs": secs,
            }
        )

    def _end(self, saved_hub: int | None) -> None:
        """The final weights to the hub directory, and a checkpoint."""
        self.record.phase("saving")
        if self._has_valid() and self.evaluator.ever:
            self._evaluate("valid")
        if saved_hub != self.progress.step:
            self.publisher.save_hub(self.progress.step)
        self.recovery.wait()
        if self.recovery.enabled and self.recovery.saved_step != self.progress.step:
            self.recovery.save(self.progress)
            self.recovery.wait()
        self.record.phase("done")
