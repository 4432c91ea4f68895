"""The teacher multiset: up to K valid actions of a chat model at one state (method: "Teacher sampling")."""

import asyncio
import dataclasses
import json
from collections.abc import Sequence

import msgspec

from actionopd_jax.chat.actions import parse_reply
from actionopd_jax.errors import RunStateError
from actionopd_jax.protocols import ChatModel, ChatRequest
from actionopd_jax.records import Action, ChatReply, Invalid, InvalidReason, State, Task, TeacherSample, digest, encode
from actionopd_jax.services.cache import Cache
from actionopd_jax.services.inflight import InFlight

NAMESPACE = "teacher"


@dataclasses.dataclass(slots=True)
class TeacherCounts:
    """What the teacher did so far. `requests` + `cached` + `shared` replies were looked at.

    Attributes:
        requests: asked of the model.
        cached: replies found in the cache.
        shared: replies of a request that was already running for an equal state.
        retries: replies that were looked at because the one before was invalid.
        invalid: replies that are no valid action.
        missing: samples given up after the retries.
    """

    requests: int = 0
    cached: int = 0
    shared: int = 0
    retries: int = 0
    invalid: int = 0
    missing: int = 0


class MultisetTeacher:
    """Implements `protocols.Teacher` over a chat model.

    K draws run at once, each with up to `retries` further requests while its reply is no valid
    action. Valid samples are kept in the order of the draws with their multiplicity; the multiset
    may hold fewer than K, or none. Every reply, valid or not, is cached under its draw before it is
    looked at, so a run that was killed asks nothing again that was answered.

    Args:
        model: the teacher behind its chat interface.
        retries: further requests per sample (paper, A.3: two).
        concurrency: requests in flight at once, over all states.
        cache: where replies are kept; None keeps nothing.
        namespace: part of the cache that is this teacher's own; a teacher whose weights change clears
            it, while nothing is in flight.
    """

    def __init__(
        self, model: ChatModel, retries: int, concurrency: int, cache: Cache | None, namespace: str = NAMESPACE
    ) -> None:
        if retries < 0 or concurrency < 1:
            raise ValueError(f"retries {retries} must not be negative, concurrency {concurrency} must be positive")
        self._model = model
        self._retries = retries
        self._concurrency = concurrency
        self._cache = cache
        self._namespace = namespace
        self._in_flight: InFlight[ChatReply] = InFlight()
        self._limit: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self.counts = TeacherCounts()

    async def sample(self, state: State, task: Task, k: int) -> Sequence[TeacherSample]:
        """Draws up to `k` valid actions at a state.

        Raises:
            ServiceError: a request failed for good. The other draws are finished first: what they
                were answered is in the cache.
        """
        draws = await asyncio.gather(*(self._draw(state, task, index) for index in range(k)), return_exceptions=True)
        samples: list[TeacherSample] = []
        for drawn in draws:
            if isinstance(drawn, BaseException):
                raise drawn
            if drawn is not None:
                samples.append(drawn)
        return tuple(samples)

    async def _draw(self, state: State, task: Task, index: int) -> TeacherSample | None:
        for attempt in range(self._retries + 1):
            reply = await self._reply(ChatRequest(state, task, (index, attempt)))
            self.counts.retries += attempt > 0
            action = _action(reply, state)
            if not isinstance(action, Invalid):
                return TeacherSample(action, attempt + 1, reply)
            self.counts.invalid += 1
        self.counts.missing += 1
        return None

    async def _reply(self, request: ChatRequest) -> ChatReply:
        key = self._key(request)
        if self._cache is not None and (stored := self._cache.get(self._namespace, key)) is not None:
            self.counts.cached += 1
            return _decode(stored)
        if key in self._in_flight:
            self.counts.shared += 1
        return await self._in_flight.share(key, lambda: self._request(request, key))

    async def _request(self, request: ChatRequest, key: str) -> ChatReply:
        async with self._semaphore():
            self.counts.requests += 1
            reply = await self._model.complete(request)
        if self._cache is None:
            return reply
        return _decode(self._cache.put(self._namespace, key, _encode(reply)))

    def _key(self, request: ChatRequest) -> str:
        task_key = request.task.key if self._model.depends_on_task else None
        return digest([request.state.key, task_key, self._model.identity, request.draw])

    def _semaphore(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._limit is None or self._limit[0] is not loop:  # a semaphore serves the loop that it was made in
            self._limit = (loop, asyncio.Semaphore(self._concurrency))
        return self._limit[1]


def _action(reply: ChatReply, state: State) -> Action:
    try:
        encode(reply)  # a sample is recorded with its whole reply: lone surrogates in any part of it spoil it
    except UnicodeEncodeError as error:
        return Invalid(InvalidReason.ENCODING, str(error))
    return parse_reply(reply, state)


def _encode(reply: ChatReply) -> bytes:
    # ASCII escapes: a reply may hold lone surrogates, which UTF-8 cannot, and must still be kept.
    return json.dumps(msgspec.to_builtins(reply)).encode("ascii")


def _decode(stored: bytes) -> ChatReply:
    try:
        return msgspec.convert(json.loads(stored), ChatReply)
    except (ValueError, msgspec.ValidationError) as error:
        raise RunStateError(f"the cache holds an unreadable teacher reply ({error}); move the cache file away") from error
