"""The optimizer chain against AdamW written out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actionopd_jax.config import UpdateConfig
from actionopd_jax.training.optimizer import apply_gradients, decayed, learning_rate_schedule, make_optimizer
from actionopd_jax.training.state import abstract_state, create_state

CONFIG = UpdateConfig(learning_rate=0.01, weight_decay=0.3, max_grad_norm=0.5, warmup_steps=4)


def _params():
    return {
        "kernel": jnp.array([[1.0, -2.0], [0.5, 3.0]]),
        "norm": {"scale": jnp.ones((2, 2))},
        "bias": jnp.array([0.2, -0.1]),
    }


def test_apply_gradients_equals_adamw_by_hand():
    rng = np.random.default_rng(0)
    optimizer = make_optimizer(CONFIG)
    state = create_state(_params(), optimizer)
    weights = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(_params())]
    decay = [0.0, 0.3, 0.0]  # bias, kernel, norm scale
    mean, square = [0.0] * 3, [0.0] * 3
    for step in range(1, 7):
        grads = [rng.normal(size=leaf.shape) * step for leaf in weights]
        tree = jax.tree.unflatten(jax.tree.structure(_params()), [jnp.asarray(g, jnp.float32) for g in grads])
        state, norm = apply_gradients(optimizer, state, tree)
        expected_norm = np.sqrt(sum((g**2).sum() for g in grads))
        assert float(norm) == pytest.approx(expected_norm, rel=1e-5)
        for i, grad in enumerate(grads):
            clipped = grad * min(1.0, 0.5 / expected_norm)
            mean[i] = 0.9 * mean[i] + 0.1 * clipped
            square[i] = 0.999 * square[i] + 0.001 * clipped**2
            direction = mean[i] / (1 - 0.9**step) / (np.sqrt(square[i] / (1 - 0.999**step)) + 1e-8)
            weights[i] = weights[i] - 0.01 * min(step / 4, 1) * (direction + decay[i] * weights[i])
    for new, old in zip(jax.tree.leaves(state.params), weights, strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_apply_gradients_with_bad_gradient_skips_the_whole_step(value):
    optimizer = make_optimizer(CONFIG)
    state = create_state(_params(), optimizer)
    good = jax.tree.map(jnp.ones_like, _params())
    state, _ = apply_gradients(optimizer, state, good)
    bad = {**good, "bias": jnp.array([1.0, value])}
    after, _ = apply_gradients(optimizer, state, bad)
    assert (int(after.bad_steps), int(after.policy_version)) == (1, 1)
    for new, old in zip(
        jax.tree.leaves((after.params, after.opt_state)), jax.tree.leaves((state.params, state.opt_state)), strict=True
    ):
        np.testing.assert_array_equal(new, old)
    again, _ = apply_gradients(optimizer, after, good)
    assert (int(again.bad_steps), int(again.policy_version)) == (1, 2)


def test_learning_rate_schedule_warms_up_linearly_and_stays():
    schedule = learning_rate_schedule(CONFIG)
    np.testing.assert_allclose([float(schedule(n)) for n in range(6)], [0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01], rtol=1e-6)
    constant = learning_rate_schedule(dataclasses.replace(CONFIG, warmup_steps=0))
    assert float(constant(0)) == pytest.approx(0.01)


def test_decayed_leaves_out_vectors_and_norm_scales():
    assert decayed(_params()) == {"kernel": True, "norm": {"scale": False}, "bias": False}


def test_abstract_state_keeps_shapes_and_dtypes():
    state = create_state(_params(), make_optimizer(CONFIG))
    abstract = abstract_state(state)
    assert jax.tree.structure(abstract) == jax.tree.structure(state)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(abstract)] == [(x.shape, x.dtype) for x in jax.tree.leaves(state)]


def test_decayed_of_layers_stacked_leaves_out_norms_and_biases():
    stacked = {name: jnp.ones((2, 3, 4)) for name in ("query", "query_bias", "key_norm", "attention_norm")}
    assert decayed(stacked) == {"query": True, "query_bias": False, "key_norm": False, "attention_norm": False}
