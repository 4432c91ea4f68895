"""Drawing an id: empirical frequencies against the exact truncated distribution in NumPy float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actionopd_jax.models.generation import draw
from actionopd_jax.records import Sampling

pytestmark = pytest.mark.usefixtures("quick_compilation")
_DRAWS = 20_000
_LOGITS = np.array([0.1, 2.0, -1.0, 1.5, 0.0, 3.0, 2.5, -2.0, 0.7, 1.0, 4.0, 5.0], np.float32)  # all different
_VALID = 10  # the two most likely ids lie beyond


@functools.partial(jax.jit, static_argnames=("sampling", "num_valid_ids"))
def _draw(logits, keys, sampling, num_valid_ids):
    return draw(logits, keys, sampling, num_valid_ids)


def _draws(logits, sampling, num_valid_ids=_VALID, seed=0):
    """Ids and log-probabilities of independent draws from one distribution."""
    keys = jax.random.split(jax.random.key(seed, impl="threefry2x32"), (1, _DRAWS))
    rows = jnp.broadcast_to(jnp.asarray(logits), (1, _DRAWS, len(logits)))
    return (np.asarray(part[0]) for part in _draw(rows, keys, sampling, num_valid_ids))


def _softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _truncated(logits, sampling, num_valid_ids=_VALID):
    """The documented distribution, id by id, in float64; equal logits rank by id."""
    scaled = logits[:num_valid_ids].astype(np.float64) / sampling.temperature
    order = sorted(range(num_valid_ids), key=lambda i: (-scaled[i], i))[: sampling.top_k or num_valid_ids]
    kept, mass = [], 0.0
    for i, probability in zip(order, _softmax(scaled[order]), strict=True):
        if kept and mass >= sampling.top_p:
            break
        kept.append(i)
        mass += probability
    expected = np.zeros(len(logits))
    expected[kept] = _softmax(scaled[kept])
    return expected


def _assert_frequencies(ids, expected):
    """Nothing outside the support; Pearson's statistic below its 1 - 1e-4 quantile for up to 11 degrees of freedom."""
    counts = np.bincount(ids, minlength=len(expected))
    support = expected > 0
    assert counts[~support].sum() == 0
    statistic = ((counts - _DRAWS * expected)[support] ** 2 / (_DRAWS * expected[support])).sum()
    assert statistic < 38


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.6, 0, 1.0),
        (2.0, 3, 1.0),
        (1.0, 0, 0.7),
        (0.6, 5, 0.95),
        (1.5, 1, 1.0),
        (1.0, 50, 0.9),
        (1.0, 0, 1e-9),
    ],
)
def test_draw_frequencies_equal_the_truncated_distribution(temperature, top_k, top_p):
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, max_tokens=1)
    ids, logprobs = _draws(_LOGITS, sampling)
    _assert_frequencies(ids, _truncated(_LOGITS, sampling))
    full = np.log(_softmax(_LOGITS.astype(np.float64) / temperature))  # not truncated, all 12 ids
    np.testing.assert_allclose(logprobs, full[ids], rtol=1e-5, atol=1e-6)


def test_draw_truncations_really_cut():
    """The cases above differ from the full distribution, and from one another."""
    kept = [
        int((_truncated(_LOGITS, Sampling(temperature=t, top_p=p, top_k=k, max_tokens=1)) > 0).sum())
        for t, k, p in [(1.0, 0, 1.0), (2.0, 3, 1.0), (1.0, 0, 0.7), (0.6, 5, 0.95), (1.0, 50, 0.9)]
    ]
    assert kept == [10, 3, 3, 4, 5]


def test_draw_of_ties_at_the_cut_keeps_the_smaller_ids():
    logits = np.array([1.0, 2.0, 1.0, 1.0, 2.0, 1.0], np.float32)
    for sampling in (
        Sampling(temperature=1.0, top_p=1.0, top_k=3, max_tokens=1),
        Sampling(temperature=1.0, top_p=0.66, top_k=0, max_tokens=1),  # the two 2.0 hold 0.576, each 1.0 holds 0.106
    ):
        ids, _ = _draws(logits, sampling, num_valid_ids=6)
        expected = _truncated(logits, sampling, num_valid_ids=6)
        assert np.flatnonzero(expected).tolist() == [0, 1, 4]
        _assert_frequencies(ids, expected)


def test_draw_of_a_uniform_distribution_is_uniform():
    sampling = Sampling(temperature=0.6, top_p=1.0, top_k=0, max_tokens=1)
    ids, _ = _draws(np.zeros(8, np.float32), sampling, num_valid_ids=8)
    _assert_frequencies(ids, np.full(8, 1 / 8))


@pytest.mark.parametrize(("top_p", "expected"), [(1.0, 1), (0.999, 0)])
def test_draw_with_top_p_1_can_draw_an_id_however_rare(monkeypatch, top_p, expected):
    """After the first id the running float32 sum is 1 exactly, yet the tail is not cut."""
    monkeypatch.setattr(jax.random, "gumbel", lambda key, shape: jnp.array([0.0, 30.0])[: shape[0]])
    keys = jax.random.split(jax.random.key(0, impl="threefry2x32"), (1, 1))
    sampling = Sampling(temperature=1.0, top_p=top_p, top_k=0, max_tokens=1)
    ids, _ = draw(jnp.array([[[0.0, -20.0]]]), keys, sampling, 2)
    assert ids.tolist() == [[expected]]


@pytest.mark.parametrize("num_ids", [1, 2, 5, 16, 37])
def test_draw_without_a_cut_follows_the_softmax_at_any_vocabulary_size(num_ids):
    """The ids fall into unequal blocks; padding of the last one is never drawn."""
    logits = np.linspace(-2, 2, num_ids).astype(np.float32)[np.random.default_rng(0).permutation(num_ids)]
    ids, _ = _draws(logits, Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=1), num_valid_ids=num_ids)
    drawn = np.bincount(ids.ravel(), minlength=num_ids)
    expected = _softmax(logits.astype(np.float64)) * ids.size
    assert drawn.size == num_ids
    assert ((drawn - expected) ** 2 / expected).sum() < num_ids - 1 + 5 * np.sqrt(2 * num_ids)


@pytest.mark.parametrize("top_k", [0, 3])
def test_draw_at_temperature_0_takes_the_most_likely_valid_id(top_k):
    sampling = Sampling(temperature=0.0, top_p=0.95, top_k=top_k, max_tokens=1)
    ids, logprobs = _draws(_LOGITS, sampling)
    assert (ids == 5).all()
    np.testing.assert_allclose(logprobs, np.log(_softmax(_LOGITS.astype(np.float64)))[5], rtol=1e-5)


def test_draw_at_temperature_0_of_a_tie_takes_the_smaller_id():
    sampling = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=1)
    ids, _ = _draws(np.array([1.0, 3.0, 3.0, 3.0], np.float32), sampling, num_valid_ids=4)
    assert (ids == 1).all()


def test_draw_depends_on_the_key_and_the_row_alone():
    """The same key and logits give the same id wherever they stand."""
    sampling = Sampling(temperature=1.0, top_p=0.95, top_k=8, max_tokens=1)
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(3, 4, 12)), jnp.float32)
    keys = jax.random.split(jax.random.key(1, impl="threefry2x32"), (3, 4))
    ids, logprobs = _draw(logits, keys, sampling, _VALID)
    order = np.array([2, 0, 1])
    moved_ids, moved_logprobs = _draw(logits[order], keys[order], sampling, _VALID)
    np.testing.assert_array_equal(moved_ids, ids[order])
    np.testing.assert_array_equal(moved_logprobs, logprobs[order])
