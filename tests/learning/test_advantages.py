"""Advantages against a loop over Python numbers."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actionopd_jax.learning.advantages import compute_advantages

_REWARDS = st.sampled_from([-1.0, 0.0, 1.0, 1.25, 1.5])


def _loop(groups, epsilon):
    kept = [i for i, g in enumerate(groups) if g is not None and max(g) - min(g) > 1e-8]
    centred = [[r - sum(groups[i]) / len(groups[i]) for r in groups[i]] for i in kept]
    flat = [c for group in centred for c in group]
    mean = sum(flat) / len(flat) if flat else 0.0
    sigma = math.sqrt(sum((c - mean) ** 2 for c in flat) / len(flat)) if flat else 0.0
    return kept, sigma, [[c / (sigma + epsilon) for c in group] for group in centred]


@given(st.lists(st.none() | st.lists(_REWARDS, min_size=1, max_size=5), max_size=8))
def test_compute_advantages_equals_the_loop(groups):
    result = compute_advantages([None if g is None else np.array(g) for g in groups], 1e-8)
    kept, sigma, values = _loop(groups, 1e-8)
    assert list(result.kept) == kept
    assert result.sigma == pytest.approx(sigma, abs=1e-12)
    for got, expected in zip(result.values, values, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-12)


def test_compute_advantages_uses_one_sigma_for_the_batch():
    result = compute_advantages([np.array([1.0, -1.0]), np.array([0.0, 0.0]), np.array([3.0, -3.0])], 1e-8)
    assert result.kept == (0, 2)
    assert result.sigma == pytest.approx(math.sqrt(5))
    np.testing.assert_allclose(result.values[1], 3 * result.values[0])


def test_compute_advantages_keeps_only_more_than_the_smallest_range():
    result = compute_advantages([np.array([0.0, 1e-8]), np.array([0.0, 1.1e-8])], 1e-8)
    assert result.kept == (1,)


@pytest.mark.parametrize("groups", [[], [None], [np.array([1.0])], [np.array([0.5, 0.5])]])
def test_compute_advantages_without_signal_is_empty(groups):
    assert compute_advantages(groups, 1e-8) == compute_advantages([], 1e-8)


def test_compute_advantages_refuses_nan_and_zero_epsilon():
    with pytest.raises(ValueError, match="group 0"):
        compute_advantages([np.array([np.nan, 1.0])], 1e-8)
    with pytest.raises(ValueError, match="epsilon"):
        compute_advantages([], 0.0)
