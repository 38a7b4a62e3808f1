"""The embedded engine: one thread that owns model and batch, and the states it may be in.

Owns when a step is taken, pausing, loading and aborting. Everything that touches the batch or the weights runs in its
thread, between two tokens; other threads hand in orders and wait for futures.
"""

from __future__ import annotations

import enum
import queue
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

import torch

from core.inference.embedded.batch import Batch
from core.inference.embedded.request import BadRequestError, Request
from core.telemetry.phases import announce

PauseMode = Literal["abort", "retract", "in_place"]


class State(enum.Enum):
    SERVING = "serving"
    DRAINING = "draining"  # a load waits for what runs; nothing is taken in
    PAUSED = "paused"
    LOADING = "loading"
    STOPPED = "stopped"


_MOVES: dict[State, set[State]] = {
    State.SERVING: {State.SERVING, State.DRAINING, State.PAUSED, State.LOADING, State.STOPPED},
    State.DRAINING: {State.LOADING, State.PAUSED, State.STOPPED, State.DRAINING},
    State.PAUSED: {State.SERVING, State.PAUSED, State.LOADING, State.STOPPED},
    State.LOADING: {State.SERVING, State.PAUSED, State.STOPPED},
    State.STOPPED: set(),
}


class IllegalMoveError(Exception):
    """The engine was asked to go from one state to another that does not follow it."""


class LoadError(Exception):
    """Weights were refused; the engine has the ones that it had."""


class EngineStoppedError(Exception):
    """The engine's thread has ended; `__cause__` says why."""


class Engine:
    """`load` copies a directory's weights into the model, and raises before it has changed any that do not fit."""

    def __init__(self, batch: Batch, load: Callable[[Path], None], *, version: str, model_path: str) -> None:
        self.batch = batch
        self.version = version
        self.model_path = model_path
        self.state = State.SERVING
        self.failure: BaseException | None = None
        self.loads = 0
        self.load_secs = 0.0
        self.steps = 0
        self.busy_secs = 0.0
        self.last_token = time.monotonic()
        self._load = load
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._requests: dict[str, Request] = {}
        self._pending_load: tuple[Path, str, bool, Future[int]] | None = None
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        self._orders.put(self._stop)
        self._thread.join(timeout)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self.state is not State.STOPPED

    def submit(self, request: Request) -> Future[None]:
        """Queues a request; a rid that is in flight already is refused."""

        def order() -> None:
            if request.rid in self._requests:
                raise BadRequestError(f"rid {request.rid!r} is in flight already")
            self._requests[request.rid] = request
            self.batch.waiting.append(request)

        return self._order(order)

    def abort(self, rid: str | None) -> Future[int]:
        """Ends one request, or all (None), with what was sampled so far; returns how many."""
        return self._order(lambda: self._abort(rid))

    def withdraw(self, request: Request) -> Future[int]:
        """Ends this very request, if it is still in flight: its client has gone."""
        return self._order(lambda: self._abort(request.rid) if self._requests.get(request.rid) is request else 0)

    def pause(self, mode: PauseMode) -> Future[None]:
        """abort: all in flight end now. retract: they stay, to be computed anew. in_place: they stay as they are."""

        def order() -> None:
            if mode == "abort":
                self._abort(None)
            elif mode == "retract":
                announce("pause")
                self.batch.retract()
            self._move(State.PAUSED)

        return self._order(order)

    def resume(self) -> Future[None]:
        def order() -> None:
            if self.state is State.PAUSED:
                self._move(State.SERVING)

        return self._order(order)

    def update(self, path: Path, version: str, *, abort_all: bool, flush: bool) -> Future[int]:
        """Loads weights once nothing runs under the old ones; returns how many requests wait meanwhile.

        Fails with LoadError, and changes nothing, if they do not fit, or if requests paused in place would go on with
        keys and values of the old weights although `flush` asks for new ones.
        """
        done: Future[int] = Future()
        done.set_running_or_notify_cancel()  # a caller that goes away does not undo an update

        def order() -> None:
            if self._pending_load is not None:
                done.set_exception(LoadError("another update is waiting for the requests in flight"))
                return
            if abort_all:
                self._abort(None)
            self._pending_load = (path, version, flush, done)
            if self.state is State.SERVING:
                self._move(State.DRAINING)

        self._order(order).add_done_callback(lambda ordered: _pass_on(ordered, done))
        return done

    def flush(self) -> Future[None]:
        return self._order(self.batch.forget)

    @property
    def in_flight(self) -> int:
        return len(self._requests)

    def _order(self, action: Callable[[], object]) -> Future:
        done: Future = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():  # its caller has gone; from here on it cannot be cancelled
                return
            if self.state is State.STOPPED:
                done.set_exception(EngineStoppedError(f"the engine has stopped: {self.failure or 'shut down'}"))
                return
            try:
                done.set_result(action())
            except Exception as error:
                done.set_exception(error)

        with self._closing:
            if not self._closed:
                self._orders.put(run)
                return done
        done.set_exception(EngineStoppedError(f"the engine has stopped: {self.failure or 'shut down'}"))
        return done

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self.state is not State.STOPPED:
                    self._take_orders(wait=not self._has_work())
                    self._load_if_due()
                    if self.state in (State.SERVING, State.DRAINING) and self._has_work():
                        self._step()
        except BaseException as error:
            traceback.print_exc()
            self.failure = error
            self.state = State.STOPPED
        finally:
            for request in list(self._requests.values()):
                self._end(request, error=f"the engine stopped: {self.failure or 'shutting down'}")
            with self._closing:
                self._closed = True
            self._refuse_orders()

    def _has_work(self) -> bool:
        if self._pending_load is not None:
            return True
        runs = bool(self.batch.running)
        return (
            runs or bool(self.batch.waiting) if self.state is State.SERVING else runs and self.state is State.DRAINING
        )

    def _take_orders(self, wait: bool) -> None:
        if wait:
            self._orders.get()()
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return
            order()

    def _step(self) -> None:
        start = time.perf_counter()
        changed = self.batch.step(self.version, admit=self.state is State.SERVING)
        self.steps += 1
        self.busy_secs += time.perf_counter() - start
        self.last_token = time.monotonic()
        for request in changed:
            if request.done:
                self._end(request)
            elif request.every is not None and self.last_token - request.notified >= request.every:
                request.notified = self.last_token
                if request.notify is not None:
                    request.notify(request)

    def _load_if_due(self) -> None:
        if self._pending_load is None or (self.batch.running and self.state is not State.PAUSED):
            return
        path, version, flush, done = self._pending_load
        self._pending_load = None
        before = State.PAUSED if self.state is State.PAUSED else State.SERVING
        self._move(State.LOADING)
        announce("load")
        start = time.perf_counter()
        try:
            if self.batch.running and flush:
                raise LoadError(
                    f"{len(self.batch.running)} requests are paused in place and would go on with keys and values "
                    "of the old weights; pause with mode retract, or send flush_cache: false. Nothing was changed"
                )
            self._load(path)
            self.batch.forget()
            self.version, self.model_path = version, str(path)
            self.loads += 1
            announce("loaded")
            self.load_secs = time.perf_counter() - start
        except LoadError as error:
            done.set_exception(error)
        except Exception as error:
            done.set_exception(LoadError(f"{path}: {error}"))
        else:
            done.set_result(self.in_flight)
        finally:
            self._move(before)

    def _abort(self, rid: str | None) -> int:
        chosen = (
            list(self._requests.values()) if rid is None else [r for r in [self._requests.get(rid)] if r is not None]
        )
        for request in chosen:
            self.batch.remove(request)
            request.finish = {"type": "abort", "message": "aborted by a client"}
            self._end(request)
        return len(chosen)

    def _end(self, request: Request, error: str | None = None) -> None:
        self._requests.pop(request.rid, None)
        if error is not None:
            request.error = error
        if request.notify is not None:
            request.notify(request)

    def _stop(self) -> None:
        if self.state is not State.STOPPED:
            self._move(State.STOPPED)

    def _refuse_orders(self) -> None:
        """After the end: whoever waits for an order hears of it."""
        if self._pending_load is not None:
            self._pending_load[3].set_exception(EngineStoppedError("the engine has stopped"))
            self._pending_load = None
        while True:
            try:
                order = self._orders.get_nowait()
            except queue.Empty:
                return
            order()

    def _move(self, state: State) -> None:
        if state not in _MOVES[self.state]:
            raise IllegalMoveError(f"the engine cannot go from {self.state.value} to {state.value}")
        self.state = state


def _pass_on(ordered: Future, done: Future) -> None:
    error = ordered.exception()
    if error is not None and not done.done():
        done.set_exception(error)
