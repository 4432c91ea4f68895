"""An environment in a thread of its own, every call under a deadline.

The thread is a daemon and serves one environment instance: one that hangs blocks neither other
episodes nor the exit of the process, and libraries that tie objects to their creating thread (SQLite)
work, because the instance is made, used and closed in the same one.
"""

import asyncio
import concurrent.futures
import dataclasses
import logging
import queue
import threading
import types
from collections.abc import Callable
from typing import NoReturn, TypeVar

from actionopd_jax.errors import ActionOPDError, EnvironmentFailure
from actionopd_jax.protocols import Environment, Suite
from actionopd_jax.records import End, Observation, Score, Task, ValidAction

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclasses.dataclass
class _Call:
    """One call on its way through the thread: leaving the `with` block settles it, whatever was raised inside."""

    function: Callable[[], object]
    settled: "concurrent.futures.Future[_Call]" = dataclasses.field(default_factory=concurrent.futures.Future)
    value: object = None
    error: BaseException | None = None

    def __enter__(self) -> "_Call":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: types.TracebackType | None) -> bool:
        self.error = error
        self.settled.set_result(self)
        return True


def _serve(calls: "queue.SimpleQueue[_Call | None]") -> None:
    while (call := calls.get()) is not None:
        if call.settled.set_running_or_notify_cancel():
            with call:
                call.value = call.function()


class EnvironmentWorker:
    """One environment instance, as an asynchronous context manager.

    Every method raises `EnvironmentFailure` when the environment crashes, breaks its contract, or does
    not answer within `timeout_s`; after that the instance is dead and every further call fails at once.
    Other errors of this package (a service that the environment needs, a missing extra) pass unchanged.
    """

    def __init__(self, suite: Suite, task: Task, timeout_s: float) -> None:
        self._suite = suite
        self._task = task
        self._timeout_s = timeout_s
        self._failure: str | None = None
        self._environment: Environment | None = None
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._calls,), name=f"environment {task.key}", daemon=True)

    async def __aenter__(self) -> "EnvironmentWorker":
        self._thread.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        closing = self._post(self._close)
        self._calls.put(None)
        # A cancelled or failed collection does not wait for environments, and a dead one never answers.
        if kind is None and self._failure is None:
            try:
                await self._outcome(closing, "close")
            except EnvironmentFailure as failure:
                _log.warning("%s", failure)

    async def reset(self) -> Observation:
        """Makes the instance and starts the task."""
        return self._expect(await self._call("reset", self._make_and_reset), Observation, "reset")

    async def step(self, action: ValidAction) -> Observation | End:
        """Executes a valid action."""
        answer = await self._call("step", lambda: self._instance().step(action))
        return answer if isinstance(answer, End) else self._expect(answer, Observation, "step")

    async def score(self) -> Score:
        """The outcome so far."""
        return self._expect(await self._call("score", lambda: self._instance().score()), Score, "score")

    async def evidence(self, tool: str) -> str | None:
        """Implementation source of a tool, for the matcher alone."""
        source = await self._call("evidence", lambda: self._instance().evidence(tool))
        return None if source is None else self._expect(source, str, "evidence")

    def _make_and_reset(self) -> Observation:
        self._environment = self._suite.make(self._task)
        return self._environment.reset()

    def _instance(self) -> Environment:
        if self._environment is None:
            raise EnvironmentFailure(f"{self._task.key}: used before reset")
        return self._environment

    def _close(self) -> None:
        if self._environment is not None:
            self._environment.close()

    def _post(self, function: Callable[[], object]) -> _Call:
        call = _Call(function)
        self._calls.put(call)
        return call

    async def _call(self, name: str, function: Callable[[], T]) -> object:
        if self._failure is not None:
            raise EnvironmentFailure(self._failure)
        return await self._outcome(self._post(function), name)

    async def _outcome(self, call: _Call, name: str) -> object:
        """The value of a posted call; sets the failure when there is none."""
        answered = asyncio.wrap_future(call.settled)
        try:
            await asyncio.wait({answered}, timeout=self._timeout_s)
        finally:
            if not answered.done():
                answered.cancel()
        if answered.cancelled():
            self._fail(f"{self._task.key}: {name} did not answer within {self._timeout_s:g} s")
        error = call.error
        if isinstance(error, ActionOPDError) and not isinstance(error, EnvironmentFailure):
            raise error
        if error is not None:
            what = str(error) if isinstance(error, EnvironmentFailure) else f"{type(error).__name__}: {error}"
            self._fail(f"{self._task.key}: {name} failed: {what}", error)
        return call.value

    def _expect(self, value: object, kind: type[T], name: str) -> T:
        if not isinstance(value, kind):
            self._fail(f"{self._task.key}: {name} broke the contract: it returned {type(value).__name__}")
        return value

    def _fail(self, message: str, cause: BaseException | None = None) -> NoReturn:
        self._failure = message
        raise EnvironmentFailure(message) from cause
