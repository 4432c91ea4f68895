"""Token scores against NumPy float64, across the chunk boundary, with gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actionopd_jax.models.logprobs import token_logprobs

pytestmark = pytest.mark.usefixtures("quick_compilation")
_WIDTH, _VOCABULARY, _LENGTH = 6, 11, 9


def _inputs(batch, terms, seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(batch, _LENGTH, _WIDTH)).astype(np.float32)
    head = rng.normal(size=(_VOCABULARY, _WIDTH)).astype(np.float32)
    source = rng.integers(0, _LENGTH, (batch, terms)).astype(np.int32)
    target = rng.integers(0, _VOCABULARY, (batch, terms)).astype(np.int32)
    return hidden, head, source, target


def _logits(hidden, head, source, temperature):
    rows = np.stack([hidden[b, source[b]] for b in range(len(hidden))]).astype(np.float64)
    return rows @ head.T.astype(np.float64) / temperature


def _log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize(("batch", "terms"), [(1, 1), (1, 511), (1, 512), (1, 513), (3, 341), (2, 512), (4, 7)])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_token_scores_equal_float64(batch, terms, temperature):
    hidden, head, source, target = _inputs(batch, terms)
    scores = token_logprobs(*(jnp.asarray(x) for x in (hidden, head, source, target)), temperature)
    logits = _logits(hidden, head, source, temperature)
    expected = _log_softmax(logits)
    chosen = np.take_along_axis(expected, target[..., None], -1)[..., 0]
    np.testing.assert_allclose(scores.logprobs, chosen, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(scores.entropy, -(np.exp(expected) * expected).sum(-1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(scores.is_argmax, logits.argmax(-1) == target)


@pytest.mark.parametrize(("batch", "terms"), [(1, 1), (3, 200)])
def test_logprob_gradients_equal_float64(batch, terms):
    """d log p(y) / d logits = one-hot(y) - p, carried to hidden states and head by hand."""
    hidden, head, source, target = _inputs(batch, terms, seed=1)
    weight = np.random.default_rng(2).normal(size=source.shape).astype(np.float32)
    temperature = 0.6

    def loss(hidden, head):
        return jnp.sum(weight * token_logprobs(hidden, head, jnp.asarray(source), jnp.asarray(target), temperature).logprobs)

    d_hidden, d_head = jax.jit(jax.grad(loss, argnums=(0, 1)))(hidden, head)
    probabilities = np.exp(_log_softmax(_logits(hidden, head, source, temperature)))
    d_logits = weight[..., None] * (np.eye(_VOCABULARY)[target] - probabilities) / temperature
    expected_hidden = np.zeros(hidden.shape)
    for b in range(batch):
        np.add.at(expected_hidden[b], source[b], d_logits[b] @ head)
    rows = np.stack([hidden[b, source[b]] for b in range(batch)])
    expected_head = np.einsum("blv,bld->vd", d_logits, rows)
    np.testing.assert_allclose(d_hidden, expected_hidden, rtol=1e-4, atol=1e-5 * np.abs(expected_hidden).max())
    np.testing.assert_allclose(d_head, expected_head, rtol=1e-4, atol=1e-5 * np.abs(expected_head).max())


def test_entropy_carries_no_gradient():
    """It is reported, never optimised."""
    hidden, head, source, target = (jnp.asarray(x) for x in _inputs(2, 5))
    grad = jax.grad(lambda h, w: token_logprobs(h, w, source, target, 0.6).entropy.sum(), argnums=(0, 1))
    grads = jax.jit(grad)(hidden, head)
    assert all((grad == 0).all() for grad in grads)


def test_token_scores_of_extreme_logits_stay_finite():
    hidden, head, source, target = _inputs(1, 30, seed=3)
    scores = token_logprobs(jnp.asarray(1e4 * hidden), *(jnp.asarray(x) for x in (head, source, target)), 0.6)
    expected = _log_softmax(_logits(1e4 * hidden, head, source, 0.6))
    np.testing.assert_allclose(
        scores.logprobs, np.take_along_axis(expected, target[..., None], -1)[..., 0], rtol=1e-5, atol=0.05
    )
    assert np.isfinite(scores.entropy).all()


def test_token_scores_show_nan_of_the_hidden_state_that_they_read():
    hidden, head, source, target = _inputs(1, 30, seed=4)
    hidden[0, 3] = np.nan
    scores = token_logprobs(*(jnp.asarray(x) for x in (hidden, head, source, target)), 0.6)
    np.testing.assert_array_equal(np.isnan(scores.logprobs), source == 3)


def test_token_scores_in_bfloat16_have_float32_logits():
    """Inputs are rounded, the logits and the softmax are not."""
    hidden, head, source, target = _inputs(1, 30, seed=5)
    half_hidden, half_head = (jnp.asarray(x, jnp.bfloat16) for x in (hidden, head))
    scores = token_logprobs(half_hidden, half_head, jnp.asarray(source), jnp.asarray(target), 0.6)
    rounded = (np.asarray(x, np.float32) for x in (half_hidden, half_head))
    expected = np.take_along_axis(_log_softmax(_logits(*rounded, source, 0.6)), target[..., None], -1)[..., 0]
    assert scores.logprobs.dtype == jnp.float32
    np.testing.assert_allclose(scores.logprobs, expected, rtol=1e-5, atol=1e-5)
