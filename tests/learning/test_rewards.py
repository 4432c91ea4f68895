"""Rewards against the table of the paper, and the identity of their mean."""

import itertools

import pytest

from actionopd_jax.learning.rewards import agreement_reward, constant_reward, reward, summarise, validity_reward
from actionopd_jax.records import Candidate, Finish, Invalid, InvalidReason, Message, StateGroup


def _agreement(count, valid=True, k=3, bonus=0.5):
    return agreement_reward(count, valid, num_teacher_samples=k, frequency_bonus=bonus)


def _group(outcomes, k, bonus):
    """One group; an outcome is a match count, None for an invalid response, "unknown" without supervision."""
    candidates = []
    for outcome in outcomes:
        action = Invalid(InvalidReason.EMPTY) if outcome is None else Message("hello")
        value = None if outcome == "unknown" else _agreement(outcome or 0, outcome is not None, k, bonus)
        count = outcome if isinstance(outcome, int) else 0
        candidates.append(Candidate((1,), (-0.5,), Finish.STOP, action, (), count, value))
    return StateGroup(0, "key", (1,), (), tuple(candidates), 0, 0)


def test_agreement_reward_equals_the_worked_example():
    # K = 3, lambda = 0.5, teacher [A, A, B]
    assert _agreement(2) == 1.25
    assert _agreement(1) == 1.0
    assert _agreement(0) == 0.0
    assert _agreement(3) == 1.5
    assert _agreement(0, valid=False) == -1.0


def test_agreement_reward_with_one_teacher_sample_ignores_the_bonus():
    assert _agreement(1, k=1, bonus=7.0) == 1.0
    assert _agreement(0, k=1, bonus=7.0) == 0.0


def test_agreement_reward_with_no_bonus_is_binary():
    assert [_agreement(c, k=4, bonus=0.0) for c in range(5)] == [0.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, True, 0, 0.5), "at least 1"),
        ((1, True, 3, -0.1), "not negative"),
        ((1, True, 3, float("nan")), "not negative"),
        ((4, True, 3, 0.5), "outside"),
        ((-1, True, 3, 0.5), "outside"),
        ((1, False, 3, 0.5), "invalid response"),
    ],
)
def test_agreement_reward_refuses_impossible_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        _agreement(*arguments)


def test_reward_of_each_kind():
    numbers = {"num_teacher_samples": 3, "frequency_bonus": 0.5}
    assert reward("agreement", 2, True, **numbers) == 1.25
    assert reward("validity", 2, True, **numbers) == validity_reward(True) == 1.0
    assert reward("validity", 0, False, **numbers) == validity_reward(False) == -1.0
    assert reward("shuffled", 2, True, **numbers) == 1.25
    assert reward("constant", 0, False, **numbers) == reward("constant", 3, True, **numbers) == constant_reward()


@pytest.mark.parametrize(("k", "bonus"), [(1, 0.5), (2, 0.0), (3, 0.5), (4, 1.7)])
def test_summarise_identity_holds_for_every_pair_of_outcomes(k, bonus):
    outcomes = [None, *range(k + 1)]
    for pair in itertools.product(outcomes, repeat=2):
        summary = summarise([_group(pair, k, bonus)], num_teacher_samples=k, frequency_bonus=bonus)
        assert abs(summary.residual) < 1e-12


def test_summarise_leaves_out_groups_without_supervision():
    groups = [_group([2, 0, None, 1], 3, 0.5), _group(["unknown", 3], 3, 0.5)]
    summary = summarise(groups, num_teacher_samples=3, frequency_bonus=0.5)
    assert (summary.coverage, summary.any_match, summary.invalid) == (0.75, 0.5, 0.25)
    assert summary.mean_reward == (1.25 + 0 - 1 + 1) / 4
    assert summary.alpha == 0.25
    assert (summary.num_groups, summary.num_unsupervised, summary.num_candidates) == (1, 1, 4)


def test_summarise_of_nothing_is_zero():
    summary = summarise([], num_teacher_samples=3, frequency_bonus=0.5)
    assert (summary.mean_reward, summary.residual, summary.num_candidates) == (0, 0, 0)
