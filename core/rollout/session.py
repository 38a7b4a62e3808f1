"""The parts of the rollout service wired together, and their life: start, the first fatal error, stop.

Owns which part gets which piece of the configuration. Routes are rollout.service's; the work is the parts'.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config import Config
from core.data.tokenizer import Tokenizer
from core.inference.backends import CLIENTS
from core.inference.client import InferenceClient
from core.rewards.pool import RewardPool
from core.rollout.admission import Limits
from core.rollout.collector import Collector
from core.rollout.evaluation import Evaluations, greedy
from core.rollout.failures import Failures
from core.rollout.image_check import BlindServerError, ImageCheck
from core.rollout.journal import Journal, read_last_publish, remove_old_versions, write_last_publish
from core.rollout.links import Daemons
from core.rollout.pool import ServerPool
from core.rollout.probe import Probe
from core.rollout.prompts import DataService
from core.rollout.statistics import FailureBudget
from core.rollout.update import Published, WeightUpdates
from core.rollout.workflow import Prompt, Settings, Workflow
from core.rpc.errors import RpcError
from core.telemetry.phases import announce

PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>")
_FATAL_LINGER_SECS = 3.0


@dataclass(frozen=True)
class Places:
    """Where the service reads and writes: paths of the run directory, and the user's own directory."""

    batches: Path
    images: Path
    index: Path
    void: Path
    weights: Path
    user: Path


class Session:
    def __init__(
        self,
        config: Config,
        places: Places,
        tokenizer: Tokenizer,
        *,
        token: str,
        daemon: str,
        attempt: int,
        context_length: int | None,
    ) -> None:
        self._config = config
        self._places = places
        self._attempt = attempt
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task] = []
        self._saving = asyncio.Lock()
        self.fatal: dict[str, str] | None = None
        self.linger_secs = _FATAL_LINGER_SECS  # after a fatal error, for those who ask what happened
        rollout, sync = config.rollout, config.weight_sync
        self._budget = FailureBudget(rollout.max_consecutive_failures)
        self._daemons = Daemons(daemon, token, fetch_timeout=sync.visible_secs + rollout.setup_timeout)
        self._data = DataService(self._daemons.data_url, token)
        self._rewards = RewardPool(
            config.reward,
            directory=places.user,
            workers=rollout.reward_workers,
            timeout=rollout.reward_timeout,
            kwargs=config.reward_kwargs,
        )
        self.pool = _pool(config, self._daemons, token)
        self.updates = WeightUpdates(
            self.pool,
            self._daemons.fetch,
            self._daemons.release,
            rolling_share=sync.paused_share if sync.mode == "rolling" else None,
            fetched=self._fetched,
            after_round=self._after_update,
        )
        settings = _settings(config, tokenizer, context_length)
        self._image_check = ImageCheck(self.pool, settings.banned, rollout.parity_check_steps)
        workflow = Workflow(self.pool, self._rewards, tokenizer, settings)
        self.journal = Journal(places.batches, places.images, places.index, places.void)
        self.collector = Collector(
            _limits(config),
            config.gconfig,
            drop_last=config.train_dataset.drop_last,
            data=self._data,
            pool=self.pool,
            workflow=workflow,
            journal=self.journal,
            failures=Failures(self._budget, self.journal, self.fail),
            before_group=None if rollout.parity == "off" else self._check_images,
        )
        self.probe = Probe(self.pool, self._data, config.gconfig, stop_ids=tokenizer.stop_ids, banned=settings.banned)
        generation = config.eval_gconfig or greedy(config.gconfig)
        self.evaluations = Evaluations(self._data, workflow, self.updates, generation)

    async def run(self) -> int:
        """Works until told to stop (0) or until something cannot go on (1)."""
        try:
            await self._rewards.start()
            for work in (
                self.pool.watch(),
                self.updates.run(),
                self.collector.admit(),
                self.collector.form(),
                self.collector.waiting.measure(),
                self._watch_servers(),
            ):
                self._tasks.append(asyncio.create_task(self._supervised(work)))
            self._go_on_after_restart()
        except Exception as error:
            self.fail(str(error), traceback.format_exc())
        await self._stopping.wait()
        if self.fatal is not None:
            await asyncio.sleep(self.linger_secs)
        await self._close()
        return 0 if self.fatal is None else 1

    def stop(self) -> None:
        self._stopping.set()

    def fail(self, message: str, first_traceback: str) -> None:
        """The first failure that cannot be lived with ends the service."""
        if self.fatal is not None:
            return
        self.fatal = {"message": message, "traceback": first_traceback}
        self.collector.halt()
        print(f"rollout stops: {message}\n{first_traceback}", file=sys.stderr, flush=True)
        self._stopping.set()

    async def _check_images(self, prompt: Prompt, pngs: Sequence[bytes]) -> None:
        try:
            await self._image_check.before(prompt, pngs)
        except BlindServerError as error:
            if self._config.rollout.parity == "stop":
                self.fail(str(error), "")
            print(f"warning: {error}", file=sys.stderr, flush=True)

    def refuse_when_fatal(self) -> None:
        if self.fatal is not None:
            raise RpcError(500, f"rollout stopped: {self.fatal['message']}\n{self.fatal['traceback']}")

    async def publish(self, published: Published, record: Mapping[str, Any]) -> None:
        """The first version that is published also says where the trainer is. Raises JournalError."""
        announce("publish")
        if not self.collector.started:
            self.collector.start(published.step)
        self.updates.publish(published)
        async with self._saving:
            await asyncio.to_thread(write_last_publish, self._places.batches, {**record, "attempt": self._attempt})

    async def retain(self, oldest_step: int) -> None:
        await asyncio.to_thread(self.journal.retain, oldest_step)

    def status(self) -> dict[str, Any]:
        return {
            **self.collector.status(),
            "served": self.pool.served(),
            "servers": self.pool.status(),
            "left_out": self.pool.left_out,
            "server_losses": self.pool.losses,
            "published": self.updates.wanted.name if self.updates.wanted else None,
            "reward_restarts": self._rewards.restarts,
            "evaluating": self.evaluations.running(),
            "fatal": self.fatal,
        }

    def metrics(self) -> dict[str, float]:
        status = self.status()
        numbers = {name: float(value) for name, value in status.items() if isinstance(value, int | float)}
        numbers["served"] = float(-1 if status["served"] is None else status["served"])
        numbers["servers_in_rotation"] = float(len(self.pool.in_rotation()))
        numbers["servers_busy_secs"] = self.pool.busy_secs()
        numbers["requests_in_flight"] = float(sum(server.running for server in self.pool.servers.values()))
        numbers["void_groups"] = float(sum(status["void"].values()))
        numbers["failed_rewards"] = float(sum(status["reward_errors"].values()))
        return numbers

    def _go_on_after_restart(self) -> None:
        """A service that was restarted inside an attempt is not told again what is published: it reads it."""
        if self.collector.started:
            return
        record = read_last_publish(self._places.batches)
        if record is not None and record.get("attempt") == self._attempt:
            published = Published.from_json(record)
            self.collector.start(published.step)
            self.updates.publish(published)

    def _after_update(self) -> None:
        self.collector.wake()
        keep = self._config.weight_sync.keep
        removed = remove_old_versions(self._places.weights, self.updates.names_in_use(), keep)
        if removed:
            print(f"removed {', '.join(removed)}: nobody reads them and {keep} newer ones exist", flush=True)

    def _fetched(self, error: Exception | None) -> None:
        if error is None:
            self._budget.succeeded("fetch")
            return
        first = self._budget.failed("fetch", type(error).__name__, str(error))
        if first is not None:
            self.fail(f"no node could fetch a version, {self._budget.limit} times in a row", first)

    async def _watch_servers(self) -> None:
        """Without any server for long there is nothing to wait for."""
        limit = max(self._config.rollout.server_deadline, self._config.rollout.setup_timeout)
        while True:
            await asyncio.sleep(1.0)
            missing = self.pool.none_for_secs()
            if self.updates.wanted is not None and missing > limit:
                reasons = {name: row["reason"] for name, row in self.pool.status().items()}
                self.fail(f"no server in rotation for {missing:.0f} s: {reasons or 'none is registered'}", "")

    async def _supervised(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self.fail(f"{type(error).__name__}: {error}", traceback.format_exc())

    async def _close(self) -> None:
        await self.evaluations.close()
        await self.collector.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._rewards.close()
        await self.pool.close()
        await self._data.close()
        await self._daemons.close()


def _pool(config: Config, daemons: Daemons, token: str) -> ServerPool:
    def client(row: dict[str, Any]) -> InferenceClient:
        told = {"max_num_seqs": config.vllm.max_num_seqs} if row["backend"] == "vllm" else {}
        return CLIENTS[row["backend"]](row["url"], token, timeout=config.rollout.request_timeout, **told)

    return ServerPool(
        daemons.registry,
        client,
        daemons.restart,
        server_deadline=config.rollout.server_deadline,
        pause_deadline=config.deadlines.pause,
        load_deadline=config.deadlines.load,
    )


def _limits(config: Config) -> Limits:
    rollout = config.rollout
    return Limits(
        rollout.max_concurrent_rollouts,
        rollout.max_head_offpolicyness,
        rollout.consumer_batch_size,
        config.total_train_steps,
    )


def _settings(config: Config, tokenizer: Tokenizer, context_length: int | None) -> Settings:
    return Settings(
        seed=config.seed,
        banned=tuple(tokenizer.token_id(name) for name in PLACEHOLDERS),
        context_length=context_length,
        request_timeout=config.rollout.request_timeout,
        request_retries=config.rollout.request_retries,
        keep_partial=not config.deterministic,
    )
