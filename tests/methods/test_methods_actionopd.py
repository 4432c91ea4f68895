import math
import statistics

import numpy as np
import pytest

from actionopd_jax.methods.actionopd import examples, trajectory_name
from actionopd_jax.records import (
    Candidate,
    ChatReply,
    EndReason,
    Finish,
    Invalid,
    InvalidReason,
    Message,
    Sampling,
    Score,
    StateGroup,
    Task,
    TeacherSample,
    Trajectory,
)
from actionopd_jax.rollout.settings import GroupRules

EPSILON = 1e-8
TEACHER = (TeacherSample(Message("a"), 1, ChatReply("a")),)


def rules(reward="agreement", **changes):
    values = {
        "num_candidates": 4,
        "num_teacher_samples": 3,
        "frequency_bonus": 0.5,
        "reward": reward,
        "commit": "best",
        "max_decisions": 20,
        "sampling": Sampling(0.6, 0.95, 20, 64),
    }
    return GroupRules(**(values | changes))


def candidate(reward, length=3, count=0, finish=Finish.STOP):
    invalid = reward == -1
    action = Invalid(InvalidReason.LENGTH) if invalid else Message("a")
    ids = tuple(range(10, 10 + length))
    return Candidate(ids, (-0.5,) * length, finish, action, (), count, reward)


COUNTS = {1.5: 3, 1.25: 2, 1.0: 1, 0.0: 0, -1.0: 0, None: 0}


def group(decision, rewards, lengths=None):
    lengths = lengths or [3] * len(rewards)
    candidates = tuple(candidate(r, n, COUNTS[r]) for r, n in zip(rewards, lengths, strict=True))
    return StateGroup(decision, "key", (1, 2, 3 + decision), TEACHER, candidates, 0, 0)


SUCCESS = Score(True, 1.0)


def trajectory(start, *groups, end=EndReason.DONE, score=SUCCESS, steps=None):
    steps = len(groups) if steps is None else steps
    return Trajectory(3, start, Task("counter", "train", "a"), groups, end, "", score, steps, 0.1)


def test_examples_whiten_over_the_batch_and_broadcast_to_every_token():
    first = group(0, [1.25, 1.0, 0.0, -1.0], [2, 3, 4, 5])
    second = group(1, [0.0, 0.0, 0.0, 1.5])
    weighted, figures = examples([trajectory(0, first), trajectory(1, second)], rules(), EPSILON)

    centred = [r - 1.25 / 4 for r in (1.25, 1.0, 0.0, -1.0)] + [r - 1.5 / 4 for r in (0.0, 0.0, 0.0, 1.5)]
    sigma = math.sqrt(sum(value * value for value in centred) / 8)  # their mean is 0
    assert len(weighted) == 8
    for example, value in zip(weighted, centred, strict=True):
        assert example.weights.dtype == np.float32
        np.testing.assert_allclose(example.weights, value / (sigma + EPSILON), rtol=1e-6)
    assert [len(example.weights) for example in weighted] == [2, 3, 4, 5, 3, 3, 3, 3]
    assert [example.response_ids.tolist() for example in weighted[:2]] == [[10, 11], [10, 11, 12]]
    assert weighted[0].prompt_ids.tolist() == [1, 2, 3]
    assert weighted[4].prompt_ids.tolist() == [1, 2, 4]
    assert figures["advantage_sigma"] == pytest.approx(sigma)
    assert statistics.pstdev([float(example.weights[0]) for example in weighted]) == pytest.approx(1.0, rel=1e-6)


def test_examples_groups_and_trajectories_are_named_apart():
    one = trajectory(0, group(0, [1.0, 0.0]), group(1, [1.0, 0.0]))
    two = trajectory(1, group(0, [1.0, 0.0]))
    weighted, _ = examples([one, two], rules(num_candidates=2), EPSILON)
    assert [example.group for example in weighted[::2]] == [example.group for example in weighted[1::2]]
    assert len({example.group for example in weighted}) == 3
    assert [example.trajectory for example in weighted] == [trajectory_name(one)] * 4 + [trajectory_name(two)] * 2


def test_examples_equal_and_unsupervised_groups_are_left_out_of_sigma():
    kept = group(0, [1.0, 0.0])
    alone, _ = examples([trajectory(0, kept)], rules(), EPSILON)
    noisy = trajectory(0, kept, group(1, [1.25, 1.25]), group(2, [-1.0, -1.0]), group(3, [None, None]))
    weighted, figures = examples([noisy], rules(), EPSILON)
    assert [example.weights.tolist() for example in weighted] == [example.weights.tolist() for example in alone]
    assert alone[0].weights[0] == pytest.approx(1.0)
    assert (figures["groups"], figures["groups_kept"], figures["groups_equal"], figures["groups_unsupervised"]) == (
        4,
        1,
        2,
        1,
    )


def test_examples_figures_satisfy_the_reward_identity():
    groups = (group(0, [1.25, 1.0, 0.0, -1.0]), group(1, [1.5, 1.5, -1.0, 0.0]), group(2, [None] * 4))
    _, figures = examples([trajectory(0, *groups)], rules(), EPSILON)
    assert figures["match_count"] == pytest.approx((2 + 1 + 3 + 3) / 8)
    assert figures["match_rate"] == pytest.approx(4 / 8)
    assert figures["invalid_rate"] == pytest.approx(2 / 8)
    assert figures["alpha"] == pytest.approx(0.25)
    assert figures["reward_mean"] == pytest.approx((1.25 + 1 - 1 + 1.5 + 1.5 - 1) / 8)
    assert figures["reward_residual"] == pytest.approx(0, abs=1e-12)


def test_examples_wrong_reward_shows_in_the_residual():
    _, figures = examples([trajectory(0, group(0, [1.25, 1.0, 0.0, -1.0]))], rules(frequency_bonus=1.0), EPSILON)
    assert abs(figures["reward_residual"]) > 0.01


@pytest.mark.parametrize("kind", ["validity", "shuffled", "constant"])
def test_examples_of_another_reward_have_no_identity(kind):
    _, figures = examples([trajectory(0, group(0, [1.0, -1.0]))], rules(kind), EPSILON)
    assert "reward_residual" not in figures
    assert figures["reward_mean"] == 0


def test_examples_trajectory_figures():
    found = [
        trajectory(0, group(0, [1.0, 0.0], [3, 9]), steps=1),
        trajectory(1, end=EndReason.ENVIRONMENT_FAILURE, score=None),
        trajectory(2, group(0, [0.0, -1.0]), end=EndReason.INVALID_ACTION, score=Score(False, 0.5), steps=0),
    ]
    _, figures = examples(found, rules(), EPSILON)
    assert (figures["trajectories"], figures["decisions"], figures["environment_steps"]) == (3, 2, 1)
    assert figures["success_rate"] == 0.5
    assert figures["score_mean"] == 0.75
    assert (figures["end_done"], figures["end_environment_failure"], figures["end_invalid_action"]) == (1, 1, 1)
    assert sum(figures[f"end_{reason.value}"] for reason in EndReason) == 3
    assert (figures["response_tokens_mean"], figures["response_tokens_max"]) == ((3 + 9 + 3 + 3) / 4, 9)


def test_examples_truncated_responses_are_counted_and_trained_on():
    cut = candidate(-1.0, 4, finish=Finish.LENGTH)
    truncated = StateGroup(0, "key", (1,), TEACHER, (cut, candidate(1.0, count=1)), 1, 0)
    weighted, figures = examples([trajectory(0, truncated)], rules(), EPSILON)
    assert figures["responses_truncated"] == 1
    assert weighted[0].weights.tolist() == pytest.approx([-1.0] * 4)


@pytest.mark.parametrize("found", [[], [trajectory(0, end=EndReason.NO_TEACHER)], [trajectory(0, group(0, [None, None]))]])
def test_examples_without_signal_are_empty_and_figures_stay_finite(found):
    weighted, figures = examples(found, rules(), EPSILON)
    assert weighted == []
    assert all(math.isfinite(value) for value in figures.values())
    assert "reward_mean" not in figures
    assert figures["groups_kept"] == 0
