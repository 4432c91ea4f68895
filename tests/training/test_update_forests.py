"""Optimizer steps on random forests of rows, with each attention, against every row alone."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from forests import forests
from hypothesis import HealthCheck, given, settings
from row_reference import (
    CONFIG,
    assert_close,
    dense_loss,
    first_adamw_step,
    fresh_params,
    make_updater,
    padded,
)

from actionopd_jax.models import attention_blockwise, attention_pallas

_LEARNING_RATE = 1e-2


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """So that a bin of 256 tokens has blocks to skip."""
    monkeypatch.setattr(attention_pallas, "BLOCK", 128)
    monkeypatch.setattr(attention_blockwise, "BLOCK", 32)


@jax.jit
def _reference(params, rows, inside, weights, old):
    return jax.value_and_grad(dense_loss)(params, rows, inside, weights, old)


@pytest.mark.parametrize("attention", ["blockwise", "pallas_interpret"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(examples=forests())
def test_optimizer_step_on_random_forests_equals_row_by_row(attention, examples):
    """Loss, gradients and the AdamW step, in float32, with ratios that are clipped here and there."""
    rng = np.random.default_rng(len(examples))
    examples = [dataclasses.replace(e, weights=rng.normal(size=len(e.weights)).astype(np.float32)) for e in examples]
    old = [(-4.0 + 0.5 * rng.normal(size=len(e.weights))).astype(np.float32) for e in examples]
    rows, inside, weights = padded(examples)
    old_rows = np.zeros(rows.shape, np.float32)
    old_rows[inside] = np.concatenate(old)
    loss, gradient = _reference(fresh_params(), rows, inside, weights, old_rows)

    updater = make_updater(dataclasses.replace(CONFIG, learning_rate=_LEARNING_RATE), attention=attention)
    bins = updater.pack(examples)
    state, sums, _, _ = updater.optimizer_step(
        updater.create_state(fresh_params()), bins.with_old_logprobs(bins.gather(old))
    )
    assert -float(sums.surrogate.objective / sums.surrogate.num_active) == pytest.approx(float(loss), rel=1e-5, abs=1e-5)
    moments = optax.tree_utils.tree_get(state.opt_state, "mu")
    assert_close(jax.tree.map(lambda mu: np.asarray(mu) / 0.1, moments), gradient)
    expected = first_adamw_step(gradient, _LEARNING_RATE)
    for new, wanted in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(new, wanted, rtol=0, atol=2e-6)
