import asyncio

import pytest

from actionopd_jax.services.inflight import InFlight


class Request:
    """A request that waits to be released; counts how often it was begun and cancelled."""

    def __init__(self, answer="answer"):
        self.answer = answer
        self.release = asyncio.Event()
        self.begun = 0
        self.cancelled = 0

    async def __call__(self):
        self.begun += 1
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def started(*coroutines):
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


def test_share_same_key_asks_once_and_answers_all():
    async def scenario():
        flight, request = InFlight(), Request()
        waiters = await started(*(flight.share("k", request) for _ in range(5)))
        assert "k" in flight
        request.release.set()
        assert await asyncio.gather(*waiters) == ["answer"] * 5
        await asyncio.sleep(0)
        assert "k" not in flight
        assert request.begun == 1

    asyncio.run(scenario())


def test_share_other_key_or_later_asks_again():
    async def scenario():
        flight, request = InFlight(), Request()
        request.release.set()
        await asyncio.gather(flight.share("a", request), flight.share("b", request))
        await flight.share("a", request)
        assert request.begun == 3

    asyncio.run(scenario())


def test_share_one_waiter_cancelled_leaves_the_others_their_answer():
    async def scenario():
        flight, request = InFlight(), Request()
        first, second, third = await started(*(flight.share("k", request) for _ in range(3)))
        first.cancel()  # the one that began the request
        third.cancel()
        await asyncio.sleep(0)
        assert first.cancelled()
        request.release.set()
        assert await second == "answer"
        assert (request.begun, request.cancelled) == (1, 0)

    asyncio.run(scenario())


def test_share_last_waiter_cancelled_cancels_the_request():
    async def scenario():
        flight, request = InFlight(), Request()
        waiters = await started(*(flight.share("k", request) for _ in range(2)))
        for waiter in waiters:
            waiter.cancel()
        await asyncio.gather(*waiters, return_exceptions=True)
        await asyncio.sleep(0)
        assert request.cancelled == 1
        assert "k" not in flight

    asyncio.run(scenario())


def test_share_newcomer_during_cancellation_begins_a_request_of_its_own():
    async def scenario():
        flight, old, new = InFlight(), Request("old"), Request("new")
        new.release.set()
        (leaver,) = await started(flight.share("k", old))
        leaver.cancel()
        newcomer = asyncio.create_task(flight.share("k", new))  # runs right after the leaver's cancellation
        await asyncio.gather(leaver, return_exceptions=True)
        assert await newcomer == "new"
        assert old.cancelled == 1

    asyncio.run(scenario())


def test_share_failure_reaches_every_waiter_and_is_not_kept():
    async def scenario():
        flight, request = InFlight(), Request(ValueError("broken"))
        waiters = await started(*(flight.share("k", request) for _ in range(3)))
        request.release.set()
        failures = await asyncio.gather(*waiters, return_exceptions=True)
        assert [str(failure) for failure in failures] == ["broken"] * 3
        with pytest.raises(ValueError, match="broken"):
            await flight.share("k", request)
        assert request.begun == 2

    asyncio.run(scenario())


def test_share_request_of_a_torn_down_loop_is_not_joined():
    flight = InFlight()

    async def forever():
        await asyncio.Event().wait()

    async def answer():
        return "answer"

    loop = asyncio.new_event_loop()
    left_behind = loop.create_task(flight.share("k", forever))
    loop.run_until_complete(asyncio.sleep(0))
    assert asyncio.run(asyncio.wait_for(flight.share("k", answer), 10)) == "answer"
    left_behind.cancel()
    loop.run_until_complete(asyncio.gather(left_behind, return_exceptions=True))
    loop.close()
