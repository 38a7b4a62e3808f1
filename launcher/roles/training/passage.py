"""A batch at the gate: its tokens of the trainer's own version are compared, or fresh ones where it has none.

Owns where the tokens of the comparison come from; the comparison is parity's, its explanation disagreement's. A batch
of an asynchronous run may hold nothing that this version sampled: then every server is asked anew (core.rollout.probe).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from core.rl.trajectory import decode_samples
from core.rpc.errors import RpcError
from launcher.roles.training.disagreement import explain
from launcher.roles.training.exchange import FetchError
from launcher.roles.training.parity import Gate, Parity, measure, with_image_effect
from launcher.roles.training.parts import Change, Part, build_part, score_parts
from launcher.roles.training.services import ServiceLostError
from launcher.roles.training.setup import Session


def pass_gate(parts: Sequence[Part], version: int, gate: Gate, session: Session) -> tuple[Parity | None, str | None]:
    """Collective. The comparison and a warning; raises ParityError. None where servers have moved on from `version`."""

    def rescore(some: Sequence[Part], change: Change) -> list[Tensor]:
        return [scores.logp_R for scores in score_parts(session.engine, some, session, change)]

    parity = measure(parts, [part.prox_R for part in parts if part.prox_R is not None], version, session.exchange)
    if parity is None:
        parts = fresh_parts(version, session)
        for part, scores in zip(parts, score_parts(session.engine, parts, session), strict=True):
            part.prox_R = scores.logp_R
        parity = measure(parts, [part.prox_R for part in parts if part.prox_R is not None], version, session.exchange)
    if parity is None:
        return None, None
    parity = with_image_effect(parity, parts[:1], rescore, session.exchange)
    if gate.passed(parity):
        return parity, None
    return parity, gate.refuse(explain(parity, parts, version, session.exchange, rescore, session.config.rollout))


def fresh_parts(version: int, session: Session) -> list[Part]:
    """The same on every rank: what each server answers now, a sample a part."""
    told: tuple[bytes, str] | None = None
    if session.is_first:
        try:
            told = session.services.get_bytes("rollout", f"/probe/{version}", timeout=300.0), ""
        except (RpcError, ServiceLostError) as error:
            told = b"", str(error)
    body, failure = session.exchange.broadcast(told)
    if failure:
        raise FetchError(f"the parity gate asked every server for an answer of version {version}: {failure}")
    samples = dict(enumerate(decode_samples(body)[0]))
    pixels = session.pixels.get([image.hash for sample in samples.values() for image in sample.images])
    return [
        build_part((number,), samples, pixels, session, tower=bool(sample.images), keep=True)
        for number, sample in samples.items()
    ]
