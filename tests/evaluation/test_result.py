import random

import msgspec
import pytest

from actionopd_jax.errors import EnvironmentFailure
from actionopd_jax.evaluation.result import summarise
from actionopd_jax.records import EndReason


def test_summarise_known_episodes_give_known_figures(episode):
    successes = {"a": [True, True, True, True, False], "b": [True, False, False, False, False], "c": [True] * 5}
    episodes = [episode(task, i, success) for task, outcomes in successes.items() for i, success in enumerate(outcomes)]
    result = summarise(episodes, 5, {"student": "x"})
    assert result.success == result.pass_1 == pytest.approx((0.8 + 0.2 + 1.0) / 3)
    assert result.pass_4 == pytest.approx((0.2 + 0.0 + 1.0) / 3)
    assert result.partial == pytest.approx(((4 + 0.25) / 5 + (1 + 1.0) / 5 + 1.0) / 3)
    assert result.success_interval[0] < result.success < result.success_interval[1]
    assert (result.num_tasks, result.num_episodes, result.trials, result.num_unscored) == (3, 15, 5, 0)
    assert result.ends == {"done": 15}
    assert result.decisions == 3
    assert result.identity == {"student": "x"}


def test_summarise_failed_environment_is_no_failure_of_the_student(episode):
    episodes = [episode("a", 0, True), episode("a", 1, None), episode("b", 0, None), episode("b", 1, None)]
    result = summarise(episodes, 2, {})
    assert result.success == 1.0
    assert (result.num_tasks, result.num_unscored, result.num_unscored_tasks) == (1, 3, 1)
    assert result.ends == {"done": 1, "environment_failure": 3}


def test_summarise_pass_4_needs_four_scored_trials(episode):
    assert summarise([episode("a", i) for i in range(3)], 3, {}).pass_4 is None
    mixed = [episode("a", i) for i in range(4)] + [episode("b", i, False) for i in range(3)] + [episode("b", 3, None)]
    assert summarise(mixed, 4, {}).pass_4 == 1.0


def test_summarise_invalid_responses_are_counted_by_reason(episode):
    episodes = [
        episode("a", success=False, invalid=True, invalid_reason="length", end=EndReason.INVALID_ACTION),
        episode("b", success=False, invalid=True, invalid_reason="length", end=EndReason.INVALID_ACTION),
        episode("c", success=False, invalid=True, invalid_reason="empty", end=EndReason.INVALID_ACTION),
        episode("d", decisions=7, response_tokens=70),
    ]
    result = summarise(episodes, 1, {})
    assert result.invalid == 0.75
    assert result.invalid_reasons == {"empty": 1, "length": 2}
    assert result.ends == {"done": 1, "invalid_action": 3}
    assert result.decisions == 4.0
    assert result.response_tokens == 40.0


def test_summarise_order_of_episodes_does_not_matter(episode):
    episodes = [episode(str(task), trial, (task * trial) % 3 == 0) for task in range(7) for trial in range(4)]
    shuffled = random.Random(1).sample(episodes, len(episodes))
    assert summarise(shuffled, 4, {}) == summarise(episodes, 4, {})


def test_summarise_nothing_scored_raises(episode):
    with pytest.raises(EnvironmentFailure, match="none of 1 episodes could be scored: server died"):
        summarise([episode("a", 0, None, end_detail="server died")], 1, {})


def test_result_json_has_unrounded_figures(episode):
    result = summarise([episode("a"), episode("b", success=False), episode("c")], 1, {})
    assert msgspec.json.decode(msgspec.json.encode(result))["success"] == 2 / 3
