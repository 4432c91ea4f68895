import asyncio
import logging
import subprocess
import sys
import threading

import pytest
from rollout_doubles import CounterSuite, add, task

from actionopd_jax.errors import EnvironmentFailure, ServiceError
from actionopd_jax.records import End, Observation
from actionopd_jax.rollout.workers import EnvironmentWorker


@pytest.fixture
def gate():
    event = threading.Event()
    yield event
    event.set()


def raising(error):
    def fault():
        raise error

    return fault


def test_worker_whole_life_happens_in_one_daemon_thread():
    suite = CounterSuite(target=2)

    async def play():
        async with EnvironmentWorker(suite, task(), 60) as environment:
            first = await environment.reset()
            second = await environment.step(add(1))
            last = await environment.step(add(1))
            return first, second, last, await environment.score(), await environment.evidence("add")

    first, second, last, score, evidence = asyncio.run(play())
    assert isinstance(first, Observation)
    assert second.messages[0].content == "1"
    assert last == End(detail="reached")
    assert score.success
    assert evidence == "source of add"
    [made] = suite.made
    [thread] = made.threads
    assert thread is not threading.main_thread()
    assert thread.daemon
    assert made.closed.is_set()


def test_worker_hung_call_fails_and_every_later_call_fails_at_once(gate):
    suite = CounterSuite(faults={"step": gate.wait})

    async def play():
        async with EnvironmentWorker(suite, task(), 60) as environment:
            await environment.reset()
            environment._timeout_s = 0.05
            with pytest.raises(EnvironmentFailure, match=r"step did not answer within 0\.05 s"):
                await environment.step(add(1))
            environment._timeout_s = 3600  # a further wait would now be endless
            for call in (environment.step(add(1)), environment.score(), environment.evidence("add")):
                with pytest.raises(EnvironmentFailure, match="did not answer"):
                    await call

    asyncio.run(play())
    gate.set()
    assert suite.made[0].closed.wait(30)  # once it comes back it is closed


@pytest.mark.parametrize("method", ["make", "reset", "step", "score"])
@pytest.mark.parametrize("error", [KeyError("table"), SystemExit(3), StopIteration("x"), EnvironmentFailure("lost")])
def test_worker_crash_becomes_environment_failure(method, error):
    suite = CounterSuite(faults={method: raising(error)})

    async def play():
        async with EnvironmentWorker(suite, task(), 60) as environment:
            await environment.reset()
            await environment.step(add(1))
            await environment.score()

    with pytest.raises(EnvironmentFailure, match="counter/train/three") as caught:
        asyncio.run(play())
    assert str(error) in str(caught.value)
    assert caught.value.__cause__ is error


def test_worker_service_error_inside_environment_passes_unchanged():
    error = ServiceError("user simulator is down")

    async def play():
        async with EnvironmentWorker(CounterSuite(faults={"step": raising(error)}), task(), 60) as environment:
            await environment.reset()
            await environment.step(add(1))

    with pytest.raises(ServiceError) as caught:
        asyncio.run(play())
    assert caught.value is error


@pytest.mark.parametrize("method", ["reset", "step", "score"])
def test_worker_wrong_answer_breaks_the_contract(method):
    suite = CounterSuite(faults={method: lambda: "text"})

    async def play():
        async with EnvironmentWorker(suite, task(), 60) as environment:
            await environment.reset()
            await environment.step(add(1))
            await environment.score()

    with pytest.raises(EnvironmentFailure, match=f"{method} broke the contract: it returned str"):
        asyncio.run(play())


def test_worker_crash_while_closing_is_only_logged(caplog):
    suite = CounterSuite(faults={"close": raising(OSError("busy"))})

    async def play():
        async with EnvironmentWorker(suite, task(), 60) as environment:
            await environment.reset()

    with caplog.at_level(logging.WARNING):
        asyncio.run(play())
    assert "close failed: OSError: busy" in caplog.text


def test_worker_cancelled_while_environment_hangs_returns_and_closes_later(gate):
    entered = threading.Event()

    def hang():
        entered.set()
        gate.wait()

    suite = CounterSuite(faults={"step": hang})

    async def play():
        async with EnvironmentWorker(suite, task(), 3600) as environment:
            await environment.reset()
            await environment.step(add(1))

    async def cancel():
        playing = asyncio.create_task(play())
        await asyncio.to_thread(entered.wait)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(cancel())
    assert not suite.made[0].closed.is_set()
    gate.set()
    assert suite.made[0].closed.wait(30)


def test_worker_hung_environment_does_not_block_exit():
    program = """
import asyncio, threading
from actionopd_jax.errors import EnvironmentFailure
from actionopd_jax.records import Task
from actionopd_jax.rollout.workers import EnvironmentWorker

class Suite:
    def make(self, task):
        threading.Event().wait()

async def main():
    async with EnvironmentWorker(Suite(), Task("a", "b", "c"), 0.05) as environment:
        try:
            await environment.reset()
        except EnvironmentFailure:
            print("failed as it should")

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "failed as it should\n"
