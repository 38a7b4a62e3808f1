"""Evaluations on held-out rows through the servers, asked for by the trainer and run beside training.

Owns when one is asked for and what becomes of its result; the rollout service runs it. Rank 0 alone uses it.
"""

from __future__ import annotations

from typing import Any

from core.rpc.errors import RpcError
from launcher.roles.training.metrics import Record
from launcher.roles.training.setup import Session


class Evaluations:
    """Asked for and not yet finished, by id."""

    def __init__(self, session: Session, record: Record) -> None:
        self.session = session
        self.record = record
        self._running: dict[str, dict[str, Any]] = {}  # what was asked for

    def start(self, step: int, *, name: str = "valid", hold: bool = False, shuffle_images: bool = False) -> None:
        """Asks for one. `hold`: servers keep their version until it is done."""
        identity = f"{name}-{step}-{self.session.arguments.attempt}-{self.session.generation}"
        body = {"id": identity, "step": step, "split": "valid", "hold_publishing": hold}
        body["shuffle_images"] = shuffle_images
        self._running[identity] = {"step": step, "name": name, "hold": hold, "shuffle_images": shuffle_images}
        self.session.services.post("rollout", "/evaluate", body, request_id=f"evaluate-{identity}")

    @property
    def running(self) -> bool:
        return bool(self._running)

    def pending(self) -> list[dict[str, Any]]:
        """Those not finished, for a checkpoint: a restart asks for them again."""
        return [{"name": asked["name"], "step": asked["step"]} for asked in self._running.values()]

    def ask_again(self, pending: list[dict[str, Any]]) -> None:
        for each in pending:
            shuffled = each["name"].endswith("-shuffled")
            self.start(each["step"], name=each["name"], shuffle_images=shuffled)

    def collect(self, wait: int = 0) -> None:
        """Records those that have finished; waits up to `wait` seconds for the first of them."""
        for identity in list(self._running):
            self._ask(identity, wait=wait)
            wait = 0

    def give_up(self, secs: float) -> None:
        """Notes those that are still running after `secs` and forgets them."""
        for asked in self._running.values():
            name, step = asked["name"], asked["step"]
            self.record.note("warning", f"evaluation {name} of step {step} was not done within {secs:.0f} s")
        self._running.clear()

    def is_served(self, version: int) -> bool:
        """Whether every server answers with at least `version`."""
        served = self.session.services.get("rollout", "/served")["served"]
        return served is not None and served >= version

    def _ask(self, identity: str, *, wait: int) -> None:
        asked = self._running[identity]
        name, step = asked["name"], asked["step"]
        try:
            reply = self.session.services.get("rollout", f"/evaluations/{identity}", timeout=wait + 30.0, wait=wait)
        except RpcError as error:
            if error.status != 404:
                raise
            self.record.note("warning", f"evaluation {name} of step {step} was lost with its service: it starts again")
            self.start(**asked)
            return
        if reply["done"]:
            del self._running[identity]
            self.record.event(evaluation_record(name, step, reply))


def evaluation_record(name: str, step: int, reply: dict[str, Any]) -> dict[str, Any]:
    """The record of metrics.jsonl; an evaluation that could not be finished has no accuracy."""
    fields = ("accuracy", "reward_mean", "rows", "version_min", "version_max", "secs", "failed", "truncated_fraction")
    found = {"kind": "eval", "name": name, "step": step, **{field: reply.get(field) for field in fields}}
    if reply.get("error"):
        found |= {"error": reply["error"], "accuracy": None, "reward_mean": None}
    return found
