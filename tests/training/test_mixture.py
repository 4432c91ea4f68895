import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actionopd_jax.errors import ConfigError, RunStateError
from actionopd_jax.records import Task
from actionopd_jax.training.mixture import TaskMixture


def _tasks(environment, count):
    return [Task(environment=environment, split="train", task_id=str(i)) for i in range(count)]


def _steps(mixture, count):
    return [mixture.next_step() for _ in range(count)]


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**62),
    before=st.integers(0, 7),
    sizes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=3),
)
def test_mixture_restored_continues_as_uninterrupted(seed, before, sizes):
    sources = [(_tasks(f"e{i}", size), starts) for i, (size, starts) in enumerate(sizes)]
    whole = TaskMixture(sources, seed)
    expected = _steps(whole, before + 6)
    first = TaskMixture(sources, seed)
    _steps(first, before)
    state = first.state()
    _steps(first, 2)  # handed out after the checkpoint, lost in a kill
    second = TaskMixture(sources, seed)
    _steps(second, 1)
    second.restore(state)
    assert _steps(second, 6) == expected[before:]


def test_mixture_step_takes_its_share_of_each_source_in_order():
    mixture = TaskMixture([(_tasks("a", 5), 2), (_tasks("b", 9), 3)], seed=1)
    for step in _steps(mixture, 4):
        assert [task.environment for task in step] == ["a", "a", "b", "b", "b"]
    assert mixture.starts_per_step == 5


def test_mixture_epoch_uses_every_task_once_in_a_new_order():
    mixture = TaskMixture([(_tasks("a", 8), 4)], seed=7)
    epochs = [tuple(task.task_id for step in _steps(mixture, 2) for task in step) for _ in range(5)]
    for epoch in epochs:
        assert sorted(epoch) == [str(i) for i in range(8)]
    assert len(set(epochs)) > 1


def test_mixture_more_starts_than_tasks_revisits_evenly():
    mixture = TaskMixture([(_tasks("a", 3), 7)], seed=7)
    counts = collections.Counter(task.task_id for step in _steps(mixture, 3) for task in step)
    assert counts == {"0": 7, "1": 7, "2": 7}


def test_mixture_other_seed_other_order():
    sources = [(_tasks("a", 30), 30)]
    assert TaskMixture(sources, 1).next_step() == TaskMixture(sources, 1).next_step()
    assert TaskMixture(sources, 1).next_step() != TaskMixture(sources, 2).next_step()


def test_mixture_equal_sources_are_shuffled_apart():
    step = TaskMixture([(_tasks("a", 30), 30), (_tasks("a", 30), 30)], 1).next_step()
    assert step[:30] != step[30:]


@pytest.mark.parametrize(
    ("sources", "seed"),
    [
        ([(_tasks("a", 5), 2)], 1),
        ([(_tasks("a", 4), 1)], 1),
        ([(_tasks("b", 4), 2)], 1),
        ([(_tasks("a", 4)[::-1], 2)], 1),
        ([(_tasks("a", 4), 2), (_tasks("b", 4), 2)], 1),
        ([(_tasks("a", 4), 2)], 2),
    ],
)
def test_mixture_restore_of_other_data_refuses(sources, seed):
    state = TaskMixture([(_tasks("a", 4), 2)], 1).state()
    with pytest.raises(RunStateError, match="other tasks, sources or another seed"):
        TaskMixture(sources, seed).restore(state)


@pytest.mark.parametrize("state", [b"", b"{", b"{}", b'{"tasks": "x"}'])
def test_mixture_restore_damaged_refuses(state):
    with pytest.raises(RunStateError, match="damaged"):
        TaskMixture([(_tasks("a", 4), 2)], 1).restore(state)


def test_mixture_source_without_tasks_refuses():
    with pytest.raises(ConfigError, match=r"sources\[1\] has no tasks"):
        TaskMixture([(_tasks("a", 4), 2), ([], 1)], 1)
