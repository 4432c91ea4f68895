import asyncio

import pytest

from actionopd_jax.errors import RunStateError, ServiceError
from actionopd_jax.evaluation.run import evaluate
from actionopd_jax.records import Task

TASKS = [Task(environment="e", split="test", task_id=str(i)) for i in range(5)]


class Player:
    """Plays from a rule; remembers what it was asked and how much ran at once."""

    def __init__(self, make, rule=lambda task, trial: int(task.task_id) % 2 == 0):
        self.make, self.rule = make, rule
        self.played, self.running, self.most_running = [], 0, 0

    async def __call__(self, task, trial):
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for _ in range(int(task.task_id) + 1):  # later tasks take longer
                await asyncio.sleep(0)
            success = self.rule(task, trial)
        finally:
            self.running -= 1
        self.played.append((task.task_id, trial))
        return self.make(task.task_id, trial, success)


def _evaluate(player, records, trials=2, tasks=TASKS, identity=None, concurrency=3, progress=None):
    identity = {"student": "a", "limits": {"decisions": 3}} if identity is None else identity
    arguments = {"identity": identity, "records": records, "concurrency": concurrency, "progress": progress}
    return asyncio.run(evaluate(tasks, trials, player, **arguments))


def test_evaluate_plays_every_task_and_trial_within_the_bound(tmp_path, episode):
    player = Player(episode)
    seen = []
    result = _evaluate(player, tmp_path / "new" / "records.jsonl", progress=lambda done, total: seen.append((done, total)))
    assert sorted(player.played) == [(str(i), trial) for i in range(5) for trial in range(2)]
    assert player.most_running == 3
    assert result.success == pytest.approx(3 / 5)
    assert seen == [(i, 10) for i in range(11)]


def test_evaluate_result_does_not_depend_on_concurrency(tmp_path, episode):
    results = [_evaluate(Player(episode), tmp_path / f"{n}.jsonl", concurrency=n) for n in (1, 4, 100)]
    assert results[0] == results[1] == results[2]


def test_evaluate_failed_service_keeps_what_was_played_and_continues(tmp_path, episode):
    def rule(task, trial):
        if (task.task_id, trial) == ("3", 1):
            raise ServiceError("sampler is gone")
        return True

    records = tmp_path / "records.jsonl"
    first = Player(episode, rule)
    with pytest.raises(ExceptionGroup) as caught:
        _evaluate(first, records)
    assert caught.group_contains(ServiceError, match="sampler is gone")
    assert first.running == 0
    second = Player(episode)
    _evaluate(second, records)
    assert first.played
    assert sorted(first.played + second.played) == [(str(i), trial) for i in range(5) for trial in range(2)]


@pytest.mark.parametrize("cut", [1, 40])
def test_evaluate_record_cut_by_a_kill_is_played_again(tmp_path, episode, cut):
    records = tmp_path / "records.jsonl"
    expected = _evaluate(Player(episode), records)
    whole = records.read_bytes()
    records.write_bytes(whole[:-cut])
    player = Player(episode)
    assert _evaluate(player, records) == expected
    assert len(player.played) == 1
    assert sorted(records.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_evaluate_more_trials_and_fewer_tasks_use_what_is_there(tmp_path, episode):
    records = tmp_path / "records.jsonl"
    _evaluate(Player(episode), records, trials=1)
    player = Player(episode)
    result = _evaluate(player, records, trials=2, tasks=TASKS[:2])
    assert sorted(player.played) == [("0", 1), ("1", 1)]
    assert (result.num_tasks, result.num_episodes) == (2, 4)


def test_evaluate_failed_environment_is_played_once_more(tmp_path, episode):
    records = tmp_path / "records.jsonl"
    first = _evaluate(Player(episode, lambda task, trial: None if task.task_id == "2" else True), records, trials=1)
    assert first.num_unscored == 1
    player = Player(episode, lambda task, trial: False)
    second = _evaluate(player, records, trials=1)
    assert player.played == [("2", 0)]
    assert (second.num_unscored, second.success) == (0, 0.8)
    assert _evaluate(player, records, trials=1) == second


def test_evaluate_other_identity_refuses_naming_what_differs(tmp_path, episode):
    records = tmp_path / "records.jsonl"
    _evaluate(Player(episode), records)
    before = records.read_bytes()
    with pytest.raises(RunStateError, match=r"another evaluation \(other student\)"):
        _evaluate(Player(episode), records, identity={"student": "b", "limits": {"decisions": 3}})
    assert records.read_bytes() == before


@pytest.mark.parametrize("damage", [b"{}\n", b"garbage\n"])
def test_evaluate_damaged_records_refuse(tmp_path, episode, damage):
    records = tmp_path / "records.jsonl"
    _evaluate(Player(episode), records)
    records.write_bytes(records.read_bytes() + damage)
    with pytest.raises(RunStateError, match="damaged"):
        _evaluate(Player(episode), records)


@pytest.mark.parametrize("wrong", [{"tasks": []}, {"tasks": [TASKS[0], TASKS[0]]}, {"trials": 0}, {"concurrency": 0}])
def test_evaluate_nothing_to_do_refuses(tmp_path, episode, wrong):
    with pytest.raises(ValueError, match="at least"):
        _evaluate(Player(episode), tmp_path / "records.jsonl", **wrong)
