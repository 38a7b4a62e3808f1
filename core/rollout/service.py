"""The routes of the rollout service. What each one means is written here; the work is the session's parts'."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core.inference.client import ServerLostError, ServerRefusedError
from core.rl.trajectory import Sample, encode_samples
from core.rollout.batches import Batch
from core.rollout.evaluation import EvaluationRequest
from core.rollout.journal import JournalError
from core.rollout.probe import NotServedError
from core.rollout.session import Session
from core.rollout.update import Published
from core.rpc.errors import RpcError
from core.rpc.service import Call, Service

_LONGEST_WAIT = 60.0


class Routes:
    def __init__(self, session: Session, *, can_evaluate: bool) -> None:
        self._session = session
        self._can_evaluate = can_evaluate

    def add_to(self, service: Service) -> None:
        service.post("/publish", self.publish)
        service.get("/served", self.served)
        service.get("/batches/{step}", self.batch)
        service.get("/batches/{step}/samples", self.samples)
        service.get("/probe/{version}", self.probe)
        service.post("/evaluate", self.evaluate)
        service.get("/evaluations/{id}", self.evaluation)
        service.post("/retain", self.retain)
        service.post("/stop", self.stop)

    async def publish(self, call: Call) -> dict:
        """A version was written: it is brought to the servers while the caller goes on."""
        body = call.json()
        try:
            published = Published.from_json(body)
        except (KeyError, TypeError, ValueError) as error:
            needed = "version, generation, name, path, digest, step and optimizer_done"
            raise RpcError(400, f"a publish needs {needed}: {error}") from None
        try:
            await self._session.publish(published, body)
        except JournalError as error:
            self._session.fail(str(error), str(error))
            raise RpcError(409, str(error)) from error
        return {}

    async def served(self, call: Call) -> dict:
        pool = self._session.pool
        servers = {server.name: server.served for server in pool.servers.values()}
        return {"served": pool.served(), "servers": servers, "sync": list(self._session.updates.syncs)}

    async def batch(self, call: Call) -> dict:
        """What each sample of a step's batch weighs, so that the trainer can pack before it fetches."""
        step = _step(call)
        batch = await self._found(step, _wait(call))
        self._session.refuse_when_fatal()
        if batch is not None:
            return {
                "ready": True,
                "end": False,
                "step": step,
                "samples": weights_of(batch.samples),
                "stats": batch.stats,
            }
        return {"ready": True, "end": True} if self._session.collector.ended else {"ready": False}

    async def samples(self, call: Call) -> bytes:
        """The samples of a batch by index, as one safetensors body."""
        step = _step(call)
        batch = await self._found(step, 0.0)
        if batch is None:
            raise RpcError(404, f"batch {step} is not there yet; the newest is {self._session.collector.formed}")
        try:
            indices = [int(part) for part in call.query.get("indices", "").split(",") if part]
        except ValueError:
            raise RpcError(400, "indices are numbers separated by commas") from None
        if any(not 0 <= i < len(batch.samples) for i in indices):
            raise RpcError(400, f"batch {step} has samples 0 to {len(batch.samples) - 1}, asked for {indices}")
        return encode_samples([batch.samples[i] for i in indices], {"step": step, "indices": indices})

    async def probe(self, call: Call) -> bytes:
        """A fresh answer of every server; 503 until all of them are on the version."""
        self._session.refuse_when_fatal()
        try:
            samples = await self._session.probe.ask(int(call.path["version"]))
        except ValueError:
            raise RpcError(400, f"a version is a number, not {call.path['version']!r}") from None
        except (NotServedError, ServerLostError) as error:
            raise RpcError(503, str(error)) from error
        except ServerRefusedError as error:
            raise RpcError(502, str(error)) from error
        return encode_samples(samples, {})

    async def evaluate(self, call: Call) -> dict:
        """Starts an evaluation; the same id again changes nothing."""
        try:
            request = EvaluationRequest.from_json(call.json())
        except (KeyError, TypeError, ValueError) as error:
            raise RpcError(400, f"an evaluation needs id and step: {error}") from None
        if request.split == "valid" and not self._can_evaluate:
            raise RpcError(400, "there is no valid_dataset to evaluate on")
        self._session.evaluations.start(request)
        return {}

    async def evaluation(self, call: Call) -> dict:
        result = await self._session.evaluations.result(call.path["id"], _wait(call))
        self._session.refuse_when_fatal()
        if result is None:
            raise RpcError(404, f"no evaluation {call.path['id']} was asked for since this service started")
        return result

    async def retain(self, call: Call) -> dict:
        """Batches before oldest_step, and the images that only they show, are no longer needed."""
        oldest = call.json().get("oldest_step")
        if not isinstance(oldest, int):
            raise RpcError(400, "retain needs oldest_step, a number")
        await self._session.retain(oldest)
        return {}

    async def stop(self, call: Call) -> dict:
        self._session.stop()
        return {}

    async def _found(self, step: int, wait: float) -> Batch | None:
        try:
            return await self._session.collector.batch(step, wait)
        except JournalError as error:
            raise RpcError(410, str(error)) from error


def weights_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """What each sample weighs, for packing; groups by number in their order."""
    groups: dict[str, int] = {}
    return [
        {
            "index": i,
            "group": groups.setdefault(sample.group_id, len(groups)),
            "length": sample.length,
            "prompt_length": len(sample.prompt_ids),
            "patches": sample.patches,
            "images": [image.hash for image in sample.images],
        }
        for i, sample in enumerate(samples)
    ]


def _step(call: Call) -> int:
    try:
        step = int(call.path["step"])
    except ValueError:
        raise RpcError(400, f"a batch has a number, not {call.path['step']!r}") from None
    if step < 1:
        raise RpcError(400, f"batches count from 1, not {step}")
    return step


def _wait(call: Call) -> float:
    try:
        return min(max(float(call.query.get("wait", "0")), 0.0), _LONGEST_WAIT)
    except ValueError:
        raise RpcError(400, "wait is a number of seconds") from None
