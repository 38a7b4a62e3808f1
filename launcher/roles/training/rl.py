"""The GRPO loop: publish, take the next batch, train it, publish, record, save, evaluate; until the batches end.

Owns the order of these and the counting of steps that moved nothing. What a step does is training.steps; a restart from
checkpoint k asks for batch k + 1 and is given the logged one.
"""

from __future__ import annotations

import time
from typing import Any

from core.rpc.errors import RpcError
from launcher.roles.training.evaluating import Evaluations
from launcher.roles.training.metrics import Record
from launcher.roles.training.parity import Gate
from launcher.roles.training.periodic import Periodic
from launcher.roles.training.publishing import Publisher
from launcher.roles.training.recovery import Progress, Recovery
from launcher.roles.training.setup import Session
from launcher.roles.training.steps import Index, Outcome, make_index, read_index, train_step

WAIT_SECS = 1  # of one question to the rollout service: in between, all ranks look for signals
POLL_SECS = 0.05
BAD_STEPS_IN_A_ROW = 3
FINAL_EVALUATION_SECS = 1800.0


class DivergedError(Exception):
    """Loss or gradient was not finite several steps in a row."""


class RolloutStoppedError(Exception):
    """The rollout service says that it cannot go on; the last step is saved by then."""


class RLLoop:
    """One generation of ranks over the rest of the run; every rank runs it in step."""

    def __init__(self, session: Session, record: Record) -> None:
        self.session = session
        self.record = record
        info = session.exchange.broadcast(session.services.get("data", "/info") if session.is_first else None)
        self.total_steps = int(info["total_batches"])
        self.record.total_steps = self.total_steps
        self.saver = Periodic(session.config.saver, info["batches_per_epoch"])
        self.evaluator = Periodic(session.config.evaluator, info["batches_per_epoch"])
        timers = {"saver": self.saver, "evaluator": self.evaluator}
        self.recovery = Recovery(session, record, info["batches_per_epoch"], timers)
        self.publisher = Publisher(session)
        self.evaluations = Evaluations(session, record)
        self.gate = Gate(session.config.rollout)
        self.progress = Progress()
        self.whole = True  # the weights are those of progress.step
        self.save_secs = 0.0  # of the saves behind the last step

    @property
    def evaluates(self) -> bool:
        config = self.session.config
        return config.valid_dataset is not None and (self.evaluator.ever or config.evaluator.eval_before_train)

    def run(self) -> None:
        """Trains to the end. Raises StopRequested when a signal came."""
        self._begin()
        saved_hub: int | None = None
        started = time.perf_counter()
        while True:
            asked = time.perf_counter()
            index, stats = self._next_batch()
            if index is None:
                break
            waited = time.perf_counter() - asked
            self.record.phase("training")
            outcome = train_step(
                index, self.session, total_steps=self.total_steps, on_update=self._moved, gate=self.gate
            )
            self.progress.step, self.whole = index.step, True
            self._judge(outcome)
            self.record.phase("publishing")
            self.publisher.publish(self.progress.step)
            if self.session.is_first:
                secs = {"wait_batch": waited, **outcome.secs, "publish": self.publisher.secs, "save": self.save_secs}
                secs["step"] = time.perf_counter() - started
                self._record(index, outcome, stats, secs)
            started = time.perf_counter()
            if self._agree(self.evaluates and index.step < self.total_steps and self.evaluator.due(index.step)):
                self._evaluate(index.step)
            saved_hub = self._save(saved_hub)
        self._end(saved_hub)

    def _evaluate(self, step: int) -> None:
        """Asks for an evaluation beside training; in deterministic mode training waits, so that its version is this."""
        waits = self.session.config.deterministic
        if waits:
            self._wait_served(step)
        if self.session.is_first:
            self.evaluations.start(step, hold=waits)
        if waits:
            self.record.phase("evaluating")
            self._finish_evaluations()

    def _save(self, saved_hub: int | None) -> int | None:
        """Whatever is due behind a step. The record of the step is written before: a checkpoint knows where it ends."""
        step, started = self.progress.step, time.perf_counter()
        if self._agree(self.saver.due(step)):
            self.record.phase("saving")
            self.publisher.save_hub(step)
            saved_hub = step
        if self.recovery.due(step):
            self.record.phase("saving")
            self.progress.evaluations = self.evaluations.pending()
            self.recovery.save(self.progress)
        self.save_secs = time.perf_counter() - started
        return saved_hub

    def _begin(self) -> None:
        """Loads the newest checkpoint and publishes what it holds, before any prompt is taken."""
        self.record.phase("loading")
        self.progress, warnings = self.recovery.load()
        for warning in warnings:
            self.record.note("warning", warning)
        if self.progress.step:
            self.record.note("info", f"goes on from checkpoint step-{self.progress.step}")
        self.record.progress.update(step=self.progress.step, version=self.progress.step)
        self.publisher.begin(self.progress.step, self.progress.lineage)
        self.progress.lineage = self.publisher.lineage
        self.record.phase("publishing")
        self.publisher.publish(self.progress.step)
        if self.session.config.evaluator.eval_before_train and self.evaluates and not self.progress.step:
            self._wait_served(0)
            if self.session.is_first:
                self.evaluations.start(0, hold=True)
            if self.session.config.deterministic:
                self._finish_evaluations()
        if self.session.is_first:
            self.evaluations.ask_again(self.progress.evaluations)

    def _next_batch(self) -> tuple[Index | None, dict[str, Any]]:
        """The next batch's index on every rank and its stats on rank 0; None at the end."""
        step = self.progress.step + 1
        self.record.phase(f"waiting for batch {step}")
        while step <= self.total_steps:
            self.session.stop.check()
            reply, packed = None, None
            if self.session.is_first:
                try:
                    path = f"/batches/{step}"
                    reply = self.session.services.get("rollout", path, timeout=WAIT_SECS + 30.0, wait=WAIT_SECS)
                    if reply["ready"]:
                        packed = {"end": True} if reply["end"] else make_index(reply, self.session)
                    self.evaluations.collect()
                except RpcError as error:
                    packed = {"stopped": error.message}
            packed = self.session.exchange.broadcast(packed)
            if packed is not None and "stopped" in packed:
                self._stop_for_good(packed["stopped"])
            if packed is not None:
                if packed.get("end"):
                    break
                if reply is not None:
                    self.progress.has_images |= any(row["images"] for row in reply["samples"])
                return read_index(packed), reply["stats"] if reply is not None else {}
        return None, {}

    def _stop_for_good(self, message: str) -> None:
        """Collective: rollouts have stopped (no server left, a failure budget used up): nothing trained is lost."""
        self.recovery.wait()
        if self.recovery.enabled and self.recovery.saved_step != self.progress.step:
            self.recovery.save(self.progress)
            self.recovery.wait()
        raise RolloutStoppedError(message)

    def _moved(self) -> None:
        self.whole = False

    def _agree(self, value: bool) -> bool:
        """Rank 0's answer, on every rank (clocks differ)."""
        return bool(self.session.exchange.broadcast(value))

    def _judge(self, outcome: Outcome) -> None:
        """Counts steps whose loss or gradient was not finite; the version moves on all the same."""
        self.progress.bad_steps = self.progress.bad_steps + 1 if outcome.skipped else 0
        if not outcome.skipped:
            return
        step = self.progress.step
        what = f"loss {outcome.loss}, gradient norm {outcome.grad_norm}"
        self.record.note("warning", f"step {step} moved nothing: {what}")
        if self.progress.bad_steps >= BAD_STEPS_IN_A_ROW:
            self.recovery.wait()  # the checkpoint that the replay begins with may still be being written
            batch = self.session.arguments.run_dir.batches / f"{step:06d}.safetensors"
            raise DivergedError(
                f"{self.progress.bad_steps} steps in a row up to {step} were not finite ({what}); lower "
                f"actor.optimizer.lr, or look at the batch {batch}: "
                f"python -m launcher replay {self.session.arguments.run_dir.root} --step {step}"
            )

    def _record(self, index: Index, outcome: Outcome, stats: dict[str, Any], secs: dict[str, float]) -> None:
        if outcome.parity_warning:
            self.record.note("warning", outcome.parity_warning)
        parity = outcome.parity
        counts = outcome.counts
        busy = secs["step"] - secs["wait_batch"]
        served = self.session.services.get("rollout", "/served")
        last_sync = (served.get("sync") or [{}])[-1]
        tokens = max(1.0, counts.tokens)
        self.record.step(
            {
                "kind": "step",
                "step": index.step,
                "version": index.step,
                "loss": outcome.loss,
                "grad_norm": outcome.grad_norm,
                "lr": outcome.lr,
                "skipped": outcome.skipped,
                "reward_mean": stats.get("reward_mean"),
                "reward_std": stats.get("reward_std"),
                "accuracy": stats.get("accuracy"),
                "entropy": outcome.entropy,
                "kl": outcome.kl,
                "ratio_max": counts.ratio_max,
                "prox_ratio_max": outcome.first_prox_diff_max,
                "behave_diff_mean": counts.behave_diff / tokens,
                "behave_diff_max": counts.behave_diff_max,
                "parity_tokens": parity.tokens if parity else None,
                "parity_mean": parity.mean if parity else None,
                "parity_max": parity.most if parity else None,
                "parity_image_effect": parity.image_effect if parity else None,
                "clip_fraction": counts.clipped / tokens,
                "capped_fraction": counts.capped / tokens,
                "tokens": outcome.tokens,
                "loss_tokens": outcome.loss_tokens,
                "tokens_per_s_train": outcome.tokens / busy,
                "tokens_per_s_rollout": stats.get("rollout_tokens_per_s"),
                "wait_rollout_secs": secs["wait_batch"],
                "secs": secs,
                "sync_secs": last_sync.get("secs"),
                "sync_version": last_sync.get("version"),
                "sync": last_sync,
                **{name: stats.get(name) for name in _FROM_STATS},
            }
        )

    def _end(self, saved_hub: int | None) -> None:
        """The final weights to the hub directory and a checkpoint, then the last evaluation with publishing held."""
        step = self.progress.step
        self.record.phase("saving")
        if saved_hub != step:
            self.publisher.save_hub(step)
        self.recovery.wait()
        if self.recovery.enabled and self.recovery.saved_step != step:
            self.progress.evaluations = self.evaluations.pending()
            self.recovery.save(self.progress)
            self.recovery.wait()
        if self.evaluates:
            self.record.phase("evaluating")
            self._wait_served(step)
            if self.session.is_first:
                self.evaluations.start(step, hold=True)
                if self.progress.has_images:
                    # the control: a model that looks at its images is lost when it is shown another prompt's
                    self.evaluations.start(step, name="valid-shuffled", hold=True, shuffle_images=True)
        self._finish_evaluations()
        self.record.phase("done")

    def _wait_served(self, version: int) -> None:
        """Collective: until every server answers with `version`. Ranks meet all the while, so that none times out."""
        deadline = time.monotonic() + self.session.config.rollout.setup_timeout
        while self._agree(self.session.is_first and not self.evaluations.is_served(version)):
            self.session.stop.check()
            if self._agree(time.monotonic() >= deadline):
                self.record.note("warning", f"not every server is at version {version}: evaluating anyway")
                return
            time.sleep(POLL_SECS)

    def _finish_evaluations(self) -> None:
        """Collective: until all evaluations are done, or have taken too long."""
        deadline = time.monotonic() + FINAL_EVALUATION_SECS
        while self._agree(self.evaluations.running and time.monotonic() < deadline):
            self.session.stop.check()
            self.evaluations.collect(wait=WAIT_SECS)
        self.evaluations.give_up(FINAL_EVALUATION_SECS)


_FROM_STATS = (
    "staleness_mean",
    "staleness_max",
    "groups",
    "samples",
    "response_tokens_mean",
    "truncated_fraction",
    "equal_reward_groups",
    "wait_trainer_secs",
    "server_busy_secs",
    "void",
    "reward_errors",
    "restarts",
    "continuations",
)
