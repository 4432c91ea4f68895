"""One request for all who ask the same thing at the same moment."""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(eq=False, slots=True)
class _Shared(Generic[T]):
    task: asyncio.Task[T]
    waiters: int = 0


class InFlight(Generic[T]):
    """Shares the answer, or the failure, of a running request among its waiters.

    A cancelled waiter leaves alone; the request itself is cancelled when its last waiter has left.
    Belongs to one event loop at a time.
    """

    def __init__(self) -> None:
        self._running: dict[str, _Shared[T]] = {}

    def __contains__(self, key: str) -> bool:
        return self._joinable(key) is not None

    def _joinable(self, key: str) -> _Shared[T] | None:
        shared = self._running.get(key)
        # A loop that was torn down may have left a request behind: nobody will ever finish it.
        return shared if shared is not None and shared.task.get_loop() is asyncio.get_running_loop() else None

    async def share(self, key: str, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Joins the running request of this key, or starts `ask()`."""
        shared = self._joinable(key)
        if shared is None:
            shared = _Shared(asyncio.get_running_loop().create_task(ask()))
            self._running[key] = shared
            shared.task.add_done_callback(lambda _, mine=shared: self._forget(key, mine))
        shared.waiters += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.waiters -= 1
            if shared.waiters == 0 and not shared.task.done():
                self._forget(key, shared)  # at once: nobody may join a request that is being cancelled
                shared.task.cancel()

    def _forget(self, key: str, shared: _Shared[T]) -> None:
        if self._running.get(key) is shared:
            del self._running[key]
