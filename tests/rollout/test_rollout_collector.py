import asyncio
import threading

import pytest
from rollout_doubles import INVALID, CounterSuite, ScriptedSampler, ScriptedTeacher, add, rules, source, student, task

from actionopd_jax.errors import RunStateError, ServiceError
from actionopd_jax.records import EndReason
from actionopd_jax.rollout.collector import Collector
from actionopd_jax.rollout.concurrency import together
from actionopd_jax.rollout.group import Source
from actionopd_jax.rollout.store import read_trajectories, step_path
from actionopd_jax.rollout.trajectory import TaskStart


def starts(origin, count):
    return [TaskStart(start, task(f"t{start}"), origin) for start in range(count)]


def collector(folder, learner, **changes):
    values = {
        "rules": rules(),
        "student": learner,
        "run_seed": 1,
        "folder": folder,
        "config_digest": "abc",
        "concurrent_tasks": 4,
        "environment_timeout_s": 60.0,
    }
    return Collector(**(values | changes))


def by_seed(prompt_ids, n, seed):
    return [(1, 2, 3, INVALID)[(seed >> (5 * i)) % 4] for i in range(n)]


class Flaky(ScriptedTeacher):
    """Fails for one task until mended; counts requests by task."""

    def __init__(self, broken):
        super().__init__([add(1), add(2)])
        self.broken = broken
        self.asked = []

    async def sample(self, state, start, k):
        await asyncio.sleep(0)
        if start.task_id == self.broken:
            raise ServiceError(f"no answer for {start.task_id}")
        self.asked.append(start.task_id)
        return await super().sample(state, start, k)


def stripped(found):
    return [(each.start, each.task, each.groups, each.end, each.score) for each in found]


def test_collector_returns_trajectories_in_order_of_start(tmp_path):
    plan = starts(source([add(1)]), 6)
    seen = []
    collecting = collector(
        tmp_path, student([1] * 4), progress=lambda done, total, each: seen.append((done, total, each.start))
    )
    found = asyncio.run(collecting.collect(list(reversed(plan)), 5, 0))
    assert [each.start for each in found] == [0, 1, 2, 3, 4, 5]
    assert [each.task.task_id for each in found] == [f"t{i}" for i in range(6)]
    assert all(each.step == 5 and each.end is EndReason.DONE for each in found)
    assert [(done, total) for done, total, _ in seen] == [(i, 6) for i in range(1, 7)]
    assert [start for *_, start in seen] == [each.start for each in read_trajectories(step_path(tmp_path, 5))]


@pytest.mark.parametrize("limit", [1, 3])
def test_collector_never_opens_more_environments_than_allowed(tmp_path, limit):
    origin = source([add(1)])
    asyncio.run(collector(tmp_path, student([1] * 4), concurrent_tasks=limit).collect(starts(origin, 9), 0, 0))
    assert origin.suite.most_open == limit
    assert origin.suite.open == 0
    assert len(origin.suite.made) == 9


def test_collector_concurrency_does_not_change_the_records(tmp_path):
    def run(limit):
        origin = source([add(1), add(2)], suite=CounterSuite(target=6))
        folder = tmp_path / str(limit)
        return asyncio.run(collector(folder, student(by_seed), concurrent_tasks=limit).collect(starts(origin, 8), 0, 0))

    assert stripped(run(1)) == stripped(run(8))


def test_collector_same_task_started_twice_gives_two_trajectories(tmp_path):
    origin = source([add(1), add(2)], suite=CounterSuite(target=6))
    plan = [TaskStart(0, task(), origin), TaskStart(1, task(), origin)]
    first, second = asyncio.run(collector(tmp_path, student(by_seed)).collect(plan, 0, 0))
    assert first.task == second.task
    assert first.groups[0].candidates != second.groups[0].candidates


def test_collector_goes_on_after_a_failure_without_asking_twice(tmp_path):
    teacher = Flaky("t3")
    suite = CounterSuite(target=4)
    origin = Source(suite, teacher, source().matcher)
    learner = student(by_seed)
    collecting = collector(tmp_path, learner, concurrent_tasks=1)
    with pytest.raises(ServiceError, match="no answer for t3"):
        asyncio.run(collecting.collect(starts(origin, 5), 0, 0))
    kept = list(read_trajectories(step_path(tmp_path, 0)))
    assert [each.start for each in kept] == [0, 1, 2]
    asked, generated = list(teacher.asked), len(learner.sampler.calls)

    teacher.broken = None
    suite.made.clear()
    found = asyncio.run(collecting.collect(starts(origin, 5), 0, 0))
    assert set(teacher.asked[len(asked) :]) == {"t3", "t4"}
    assert len(learner.sampler.calls) - generated == sum(len(each.groups) for each in found[3:])
    assert found[:3] == kept

    whole = Source(CounterSuite(target=4), Flaky(None), source().matcher)
    undisturbed = asyncio.run(collector(tmp_path / "other", student(by_seed)).collect(starts(whole, 5), 0, 0))
    assert stripped(found) == stripped(undisturbed)
    again = asyncio.run(collecting.collect(starts(origin, 5), 0, 0))
    assert again == found
    assert len(suite.made) == 2


def test_collector_resumes_after_a_kill_in_the_middle_of_a_write(tmp_path):
    origin = source([add(1)])
    learner = student([1] * 4)
    collecting = collector(tmp_path, learner)
    first = asyncio.run(collecting.collect(starts(origin, 3), 0, 0))
    path = step_path(tmp_path, 0)
    lost = list(read_trajectories(path))[-1]
    path.write_bytes(path.read_bytes()[:-5])
    origin.suite.made.clear()
    again = asyncio.run(collecting.collect(starts(origin, 3), 0, 0))
    assert stripped(again) == stripped(first)
    assert len(origin.suite.made) == 1
    assert sorted(each.start for each in read_trajectories(path)) == [0, 1, 2]
    assert lost.start in {each.start for each in again}


def test_collector_cancelled_leaves_complete_records_only(tmp_path):
    gate = threading.Event()
    waiting = source([add(1)], suite=CounterSuite(faults={"reset": gate.wait}))
    quick = source([add(1)])
    plan = [TaskStart(0, task("a"), quick), TaskStart(1, task("b"), waiting), TaskStart(2, task("c"), quick)]
    done = asyncio.Event()
    finished = []

    def progress(count, total, each):
        finished.append(each.start)
        if count == 2:
            done.set()

    async def cancel():
        collecting = asyncio.create_task(collector(tmp_path, student([1] * 4), progress=progress).collect(plan, 0, 0))
        await done.wait()
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting

    try:
        asyncio.run(cancel())
    finally:
        gate.set()
    whole = step_path(tmp_path, 0).read_bytes()
    assert sorted(each.start for each in read_trajectories(step_path(tmp_path, 0))) == [0, 2] == sorted(finished)
    plan[1] = TaskStart(1, task("b"), quick)
    found = asyncio.run(collector(tmp_path, student([1] * 4)).collect(plan, 0, 0))
    assert [each.start for each in found] == [0, 1, 2]
    assert step_path(tmp_path, 0).read_bytes().startswith(whole)


def test_collector_hung_environment_ends_only_its_own_episode(tmp_path):
    gate = threading.Event()
    plan = [
        TaskStart(0, task("a"), source(suite=CounterSuite(faults={"step": gate.wait}))),
        TaskStart(1, task("b"), source([add(1)])),
    ]
    try:
        found = asyncio.run(collector(tmp_path, student([1] * 4), environment_timeout_s=3.0).collect(plan, 0, 0))
    finally:
        gate.set()
    assert [each.end for each in found] == [EndReason.ENVIRONMENT_FAILURE, EndReason.DONE]


def test_collector_two_policy_versions_in_a_step_are_refused(tmp_path):
    class Moving(ScriptedSampler):
        async def generate(self, prompt_ids, sampling, n, seed):
            answer = await super().generate(prompt_ids, sampling, n, seed)
            self.policy_version = 1
            return answer

    learner = student([1] * 4)
    object.__setattr__(learner, "sampler", Moving([1] * 4))
    with pytest.raises(ServiceError, match="policy version 1 while version 0"):
        asyncio.run(collector(tmp_path, learner).collect(starts(source([add(1)]), 2), 0, 0))


def test_collector_file_with_other_tasks_is_refused(tmp_path):
    origin = source([add(1)])
    asyncio.run(collector(tmp_path, student([1] * 4)).collect(starts(origin, 2), 0, 0))
    with pytest.raises(RunStateError, match="holds counter/train/t1 at start 1"):
        asyncio.run(collector(tmp_path, student([1] * 4)).collect(starts(origin, 1), 0, 0))
    with pytest.raises(RunStateError, match="config_digest"):
        asyncio.run(collector(tmp_path, student([1] * 4), config_digest="new").collect(starts(origin, 2), 0, 0))


def test_collector_repeated_position_is_refused(tmp_path):
    plan = [TaskStart(0, task(), source()), TaskStart(0, task(), source())]
    with pytest.raises(ValueError, match="position"):
        asyncio.run(collector(tmp_path, student([1] * 4)).collect(plan, 0, 0))


def test_together_first_error_keeps_its_type_and_cancels_the_rest():
    cancelled = []

    async def fail():
        await asyncio.sleep(0)
        raise ServiceError("down")

    async def wait():
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(ServiceError, match="down"):
        asyncio.run(together([wait(), fail(), wait()]))
    assert cancelled == [True, True]


def test_together_results_keep_their_order():
    async def later(value):
        await asyncio.sleep(0.01 * (3 - value))
        return value

    assert asyncio.run(together([later(i) for i in range(3)])) == [0, 1, 2]
