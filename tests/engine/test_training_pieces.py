"""Pieces of the trainer that talk to the world: timers, services that move, images by hash, signals."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from core.config import load
from core.data.images import encode_png
from core.rpc.errors import RpcError
from core.rpc.service import Call, Service, serve_in_thread
from launcher.roles.training.exchange import TERM_GRACE_SECS, USR2_GRACE_SECS, Exchange, StopFlags, StopRequested
from launcher.roles.training.periodic import Periodic
from launcher.roles.training.services import Pixels, ServiceLostError, Services
from launcher.roles.training.setup import choose_algorithms
from tests.engine.scene import alone

TOKEN = "t" * 64
SMOKE = Path(__file__).resolve().parents[2] / "configs" / "smoke.yaml"


def timer(epochs=None, steps=None, secs=None, per_epoch=10) -> Periodic:
    return Periodic(SimpleNamespace(freq_epochs=epochs, freq_steps=steps, freq_secs=secs), per_epoch)


@pytest.mark.parametrize(
    ("periodic", "due"),
    [
        (timer(steps=4), [4, 8, 12, 16, 20]),
        (timer(epochs=1), [10, 20]),
        (timer(epochs=2), [20]),
        (timer(epochs=1, steps=8), [8, 10, 16, 20]),
        (timer(), []),
    ],
)
def test_epochs_and_steps_are_absolute(periodic, due):
    assert [step for step in range(1, 21) if periodic.due(step)] == due
    assert periodic.ever == bool(due)


def test_seconds_count_from_the_last_time():
    periodic = timer(secs=0.05)
    assert not periodic.due(1)
    time.sleep(0.06)
    assert periodic.due(2)
    assert not periodic.due(3)


class Registry:
    """A daemon's registry over HTTP whose entries a test moves."""

    def __init__(self) -> None:
        self.services: dict[str, str] = {}
        service = Service("daemon", TOKEN)

        async def registry(call: Call) -> dict:
            return {"services": self.services}

        service.get("/registry", registry)
        self.url = serve_in_thread(service)

    def serve(self, name: str, path: str, handler) -> Service:
        service = Service(name, TOKEN)
        service.get(path, handler)
        self.services[name] = serve_in_thread(service)
        return service


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry()


def test_a_service_that_comes_back_on_another_port_is_found_again(registry):
    async def first(call: Call) -> dict:
        return {"from": 1}

    async def second(call: Call) -> dict:
        return {"from": 2}

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    old = Service("moving", TOKEN)
    old.get("/x", first)
    registry.services["moving"] = asyncio.run_coroutine_threadsafe(old.start(), loop).result(10)
    services = Services(registry.url, TOKEN, patience=20)
    assert services.get("moving", "/x") == {"from": 1}
    asyncio.run_coroutine_threadsafe(old.stop(), loop).result(10)
    timer = threading.Timer(0.5, lambda: registry.serve("moving", "/x", second))
    timer.start()
    assert services.get("moving", "/x") == {"from": 2}
    timer.join()


def test_not_ready_is_asked_again_and_refused_is_raised_at_once(registry):
    calls = []

    async def slow(call: Call) -> dict:
        calls.append(None)
        if len(calls) < 3:
            raise RpcError(503, "not yet")
        return {"ok": True}

    async def wrong(call: Call) -> dict:
        raise RpcError(404, "no such batch")

    services = Services(registry.url, TOKEN, patience=20)
    registry.serve("slow", "/x", slow)
    registry.serve("wrong", "/x", wrong)
    assert services.get("slow", "/x") == {"ok": True}
    with pytest.raises(RpcError, match="no such batch"):
        services.get("wrong", "/x")


def test_a_service_that_never_comes_is_named_after_the_patience(registry):
    with pytest.raises(ServiceLostError, match=r"nobody was not registered within 0\.3 s"):
        Services(registry.url, TOKEN, patience=0.3).get("nobody", "/x")


def test_an_image_is_fetched_once_and_memory_is_bounded(registry):
    fetched: list[str] = []
    pictures = {f"{i}": np.full((28, 28, 3), i, dtype=np.uint8) for i in range(6)}

    async def image(call: Call) -> bytes:
        fetched.append(call.path["hash"])
        return encode_png(pictures[call.path["hash"]])

    registry.serve("data", "/images/{hash}", image)
    pixels = Pixels(Services(registry.url, TOKEN, patience=10), limit_bytes=4 * 28 * 28 * 3)
    found = pixels.get(["0", "1", "0", "2"])
    assert sorted(fetched) == ["0", "1", "2"]
    assert all(np.array_equal(found[name], pictures[name]) for name in "012")
    pixels.get(["1", "2"])
    assert len(fetched) == 3
    pixels.get(["3", "4", "5"])  # two of the first three must go, the least used first
    pixels.get(["2", "3", "4", "5"])
    assert len(fetched) == 6
    pixels.get(["0"])
    assert fetched[-1] == "0"


@pytest.mark.parametrize(("number", "grace"), [(signal.SIGUSR2, USR2_GRACE_SECS), (signal.SIGTERM, TERM_GRACE_SECS)])
def test_a_signal_is_a_flag_until_it_is_read(number, grace):
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR2)}
    flags = StopFlags(Exchange(alone()))
    try:
        flags.install()
        flags.check()
        os.kill(os.getpid(), number)
        with pytest.raises(StopRequested, match=number.name):
            flags.check()
        assert flags.grace == grace
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def test_deterministic_algorithms_are_a_choice_of_the_configuration():
    """An operation that has no deterministic form (put_, says torch's documentation) raises then, and else does not."""

    def put() -> None:
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))

    chosen = lambda *keys: choose_algorithms(load(SMOKE, [*keys]))  # noqa: E731
    try:
        chosen("deterministic=false")
        put()
        chosen("deterministic=false", "actor.archon.use_deterministic_algorithms=true")
        with pytest.raises(RuntimeError, match="deterministic"):
            put()
    finally:
        torch.use_deterministic_algorithms(False)
