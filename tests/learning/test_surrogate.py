"""The surrogate against a loop over tokens in double precision; its gradient against differences of that loop."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actionopd_jax.learning.surrogate import dual_clipped_surrogate, likelihood

ETA, DUAL = 0.2, 3.0


def _loop(new, old, weight, active):
    sums = dict.fromkeys(("objective", "num_active", "clipped", "dual_clipped", "ratio", "approx_kl"), 0.0)
    largest = 0.0
    for n, o, a, on in zip(new, old, weight, active, strict=True):
        if not on:
            continue
        ratio = math.exp(n - o)
        bounded = min(max(ratio, 1 - ETA), 1 + ETA)
        h = min(ratio * a, bounded * a)
        h_dual = max(h, DUAL * a) if a < 0 else h
        sums["objective"] += h_dual
        sums["num_active"] += 1
        sums["clipped"] += h_dual == bounded * a and bounded != ratio and a != 0
        sums["dual_clipped"] += a < 0 and h < DUAL * a
        sums["ratio"] += ratio
        sums["approx_kl"] += ratio - 1 - (n - o)
        largest = max(largest, ratio)
    return sums | {"ratio_max": largest}


def _random(seed, size=400):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(2.0, size)
    new = old + rng.normal(0, 0.8, size)
    weight = rng.normal(size=size) * rng.integers(0, 2, size)
    new, old, weight = (np.asarray(x, np.float32) for x in (new, old, weight))
    return new, old, weight, rng.random(size) < 0.8


def _sums(new, old, weight, active):
    return dual_clipped_surrogate(*map(jnp.asarray, (new, old, weight, active)), ETA, DUAL)


@pytest.mark.parametrize("seed", range(3))
def test_dual_clipped_surrogate_equals_the_loop(seed):
    given = _random(seed)
    expected = _loop(*(x.astype(np.float64) for x in given[:3]), given[3])
    assert expected["clipped"] > 5
    assert expected["dual_clipped"] > 0
    for name, value in _sums(*given)._asdict().items():
        assert float(value) == pytest.approx(expected[name], rel=1e-4, abs=1e-4), name


def test_dual_clipped_surrogate_gradient_equals_differences_of_the_loop():
    new, old, weight, active = _random(5, size=80)
    gradient = jax.grad(lambda x: _sums(x, old, weight, active).objective)(jnp.asarray(new))
    wide, old, weight = (x.astype(np.float64) for x in (new, old, weight))
    for i in range(len(new)):
        up, down = wide.copy(), wide.copy()
        up[i] += 1e-6
        down[i] -= 1e-6
        difference = (_loop(up, old, weight, active)["objective"] - _loop(down, old, weight, active)["objective"]) / 2e-6
        assert float(gradient[i]) == pytest.approx(difference, rel=1e-3, abs=1e-4)


def test_dual_clipped_surrogate_gradient_at_ratio_one_is_the_advantage():
    _, old, weight, active = _random(1, size=50)
    gradient = jax.grad(lambda x: _sums(x, old, weight, active).objective)(jnp.asarray(old))
    np.testing.assert_allclose(gradient, np.where(active, weight, 0), rtol=1e-6)


def test_dual_clipped_surrogate_inactive_terms_may_hold_anything():
    new, old, weight, active = (np.array(x) for x in _random(2, size=20))
    clean = _sums(new, old, weight, active)
    for array in (new, old, weight):
        array[~active] = np.nan
    new[np.flatnonzero(~active)[0]] = np.inf
    assert [float(x) for x in _sums(new, old, weight, active)] == [float(x) for x in clean]
    gradient = jax.grad(lambda x: _sums(x, old, weight, active).objective)(jnp.asarray(new))
    assert np.isfinite(gradient).all()
    assert (np.asarray(gradient)[~active] == 0).all()


@pytest.mark.parametrize("log_ratio", [-500.0, 500.0])
@pytest.mark.parametrize("advantage", [-2.0, 0.0, 2.0])
def test_dual_clipped_surrogate_extreme_ratio_stays_finite(log_ratio, advantage):
    def objective(x):
        return _sums(x, jnp.zeros(1), jnp.array([advantage]), jnp.array([True])).objective

    value, gradient = jax.value_and_grad(objective)(jnp.array([log_ratio]))
    bounds = {(500.0, 2.0): 2.4, (500.0, -2.0): -6.0, (-500.0, 2.0): 0.0, (-500.0, -2.0): -1.6}
    assert float(value) == pytest.approx(bounds.get((log_ratio, advantage), 0.0), abs=1e-6)
    assert float(gradient[0]) == pytest.approx(0.0, abs=1e-6)


def test_dual_clipped_surrogate_never_hides_an_active_nan():
    new, old, weight, active = (np.array(x) for x in _random(2, size=20))
    new[np.flatnonzero(active)[0]] = np.nan
    assert np.isnan(_sums(new, old, weight, active).objective)


def test_dual_clipped_surrogate_parts_merge_to_the_whole():
    given = _random(3, size=100)
    left, right = (_sums(*(x[part] for x in given)) for part in (slice(0, 30), slice(30, None)))
    for a, b in zip(left.merge(right), _sums(*given), strict=True):
        assert float(a) == pytest.approx(float(b), rel=1e-5)


@pytest.mark.parametrize(("eta", "dual"), [(0.0, 3.0), (1.0, 3.0), (0.2, 1.0)])
def test_dual_clipped_surrogate_refuses_settings_out_of_range(eta, dual):
    with pytest.raises(ValueError, match="must"):
        dual_clipped_surrogate(*map(jnp.asarray, _random(0, 4)), eta, dual)


def test_likelihood_sums_weighted_logprobs():
    new, _, weight, active = _random(4)
    sums = likelihood(jnp.asarray(np.where(active, new, np.nan)), jnp.asarray(weight), jnp.asarray(active))
    assert float(sums.objective) == pytest.approx(float((weight * new)[active].sum(dtype=np.float64)), rel=1e-4)
    assert float(sums.num_active) == active.sum()
