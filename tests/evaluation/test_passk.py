import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actionopd_jax.evaluation.passk import bootstrap_interval, mean_pass_hat_k, pass_hat_k, percent


@given(n=st.integers(1, 8), data=st.data())
def test_pass_hat_k_equals_share_of_all_successful_subsets(n, data):
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    trials = [True] * c + [False] * (n - c)
    subsets = list(itertools.combinations(trials, k))
    assert pass_hat_k(c, n, k) == pytest.approx(sum(map(all, subsets)) / len(subsets))


@pytest.mark.parametrize(
    ("successes", "trials", "k", "expected"),
    [(3, 4, 1, 0.75), (3, 4, 4, 0.0), (4, 4, 4, 1.0), (4, 5, 4, 0.2), (6, 8, 4, 15 / 70), (0, 1, 1, 0.0)],
)
def test_pass_hat_k_known_counts_give_known_values(successes, trials, k, expected):
    assert pass_hat_k(successes, trials, k) == pytest.approx(expected)


@pytest.mark.parametrize(("successes", "trials", "k"), [(1, 3, 4), (1, 3, 0), (4, 3, 1), (-1, 3, 1), (0, 0, 1)])
def test_pass_hat_k_undefined_refuses(successes, trials, k):
    with pytest.raises(ValueError, match="trials"):
        pass_hat_k(successes, trials, k)


def test_mean_pass_hat_k_weighs_tasks_equally():
    assert mean_pass_hat_k([(4, 4), (0, 8), (4, 5)], 4) == pytest.approx((1 + 0 + 0.2) / 3)
    with pytest.raises(ValueError, match="no tasks"):
        mean_pass_hat_k([], 1)


def test_bootstrap_interval_matches_normal_theory_on_many_tasks():
    means = np.array([1.0] * 300 + [0.0] * 700)
    low, high = bootstrap_interval(means, seed=3)
    half = 1.96 * np.sqrt(0.3 * 0.7 / 1000)
    assert low == pytest.approx(0.3 - half, abs=0.003)
    assert high == pytest.approx(0.3 + half, abs=0.003)
    assert (low, high) == bootstrap_interval(means, seed=3)


def test_bootstrap_interval_equal_tasks_is_a_point():
    assert bootstrap_interval(np.array([0.5, 0.5]), seed=1) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("fraction", "shown"),
    [
        (0.1235, "12.4"),
        (0.1245, "12.5"),  # half to even, or the binary value, would give 12.4
        (0.0625, "6.3"),
        (0.2225, "22.3"),
        (0.12349999, "12.3"),
        (1.0, "100.0"),
        (0.0, "0.0"),
        (-0.0001, "0.0"),
        (-0.0005, "-0.1"),
        (1e-9, "0.0"),
    ],
)
def test_percent_rounds_halves_away_from_zero(fraction, shown):
    assert percent(fraction) == shown
