"""Attention over `end`: blockwise against dense, and both against textbook attention in NumPy float64."""

import functools

import beartype
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actionopd_jax.models.attention import attend, visible

pytestmark = pytest.mark.usefixtures("quick_compilation")
_BLOCK = 16
_LENGTHS = (7, 16, 41, 64)  # shorter than a block, one block, no multiple, several blocks


def _inputs(seed, batch, length, heads=4, kv_heads=2, width=8):
    rng = np.random.default_rng(seed)
    shapes = [(batch, length, n, width) for n in (heads, kv_heads, kv_heads, heads)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def _textbook(q, k, v, end):
    """One query, one head, one key at a time, in float64."""
    batch, length, heads, width = q.shape
    group = heads // k.shape[2]
    out = np.zeros(q.shape, np.float64)
    for b, i, h in np.ndindex(batch, length, heads):
        keys = [j for j in range(i + 1) if i < end[b, j]]
        if keys:
            scores = np.array([q[b, i, h].astype(np.float64) @ k[b, j, h // group] for j in keys]) / np.sqrt(width)
            weights = np.exp(scores - scores.max())
            out[b, i, h] = weights / weights.sum() @ v[b, keys, h // group].astype(np.float64)
    return out


@functools.partial(jax.jit, static_argnames=("implementation",))
def _out_and_gradients(q, k, v, cotangent, end, implementation):
    out, pullback = jax.vjp(lambda q, k, v: attend(q, k, v, end, implementation, _BLOCK), q, k, v)
    return out, *pullback(cotangent)


def _assert_blockwise_equals_dense(inputs, end):
    dense, blockwise = (_out_and_gradients(*inputs, jnp.asarray(end), name) for name in ("dense", "blockwise"))
    for expected, actual in zip(dense, blockwise, strict=True):
        assert np.isfinite(actual).all()
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    return [np.asarray(part) for part in blockwise]


_attend = jax.jit(attend, static_argnames=("implementation", "block"))


@st.composite
def _forest_ends(draw):
    """Subtree ends of a random forest in preorder, from its depths; two rows."""
    length = draw(st.sampled_from(_LENGTHS))
    rows = []
    for _ in range(2):
        depths = [0]
        for rise in draw(st.lists(st.integers(0, 100), min_size=length - 1, max_size=length - 1)):
            # Mostly down a chain; sometimes back to any depth, a new tree included.
            depths.append(depths[-1] + 1 if rise < 85 else rise % (depths[-1] + 1))
        ends = [next((i for i in range(j + 1, length) if depths[i] <= depths[j]), length) for j in range(length)]
        rows.append(ends)
    return np.array(rows, np.int32)


@st.composite
def _any_ends(draw, lowest):
    """Ends from `j + lowest` to beyond the length; two rows."""
    length = draw(st.sampled_from(_LENGTHS))
    rows = [[j + draw(st.integers(lowest, length + 3)) for j in range(length)] for _ in range(2)]
    return np.array(rows, np.int32)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(_forest_ends(), st.integers(0, 1000))
def test_blockwise_on_random_forests_equals_dense(end, seed):
    _assert_blockwise_equals_dense(_inputs(seed, *end.shape), end)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(_any_ends(lowest=1), st.integers(0, 1000))
def test_blockwise_on_arbitrary_ends_equals_dense(end, seed):
    _assert_blockwise_equals_dense(_inputs(seed, *end.shape), end)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(_any_ends(lowest=-3), st.integers(0, 1000))
def test_blockwise_where_some_queries_see_nothing_equals_dense(end, seed):
    _assert_blockwise_equals_dense(_inputs(seed, *end.shape), end)


@pytest.mark.parametrize("length", _LENGTHS)
def test_attend_when_nothing_is_visible_gives_zeros_and_zero_gradients(length):
    parts = _assert_blockwise_equals_dense(_inputs(1, 2, length), np.zeros((2, length), np.int32))
    for part in parts:
        assert (part == 0).all()


@pytest.mark.parametrize("length", _LENGTHS)
def test_attend_with_one_blind_row_in_the_batch_leaves_the_other_row_alone(length):
    q, k, v, cotangent = _inputs(2, 2, length)
    end = np.stack([np.zeros(length, np.int32), np.full(length, length, np.int32)])
    out, d_q, d_k, d_v = _assert_blockwise_equals_dense((q, k, v, cotangent), end)
    np.testing.assert_allclose(out, _textbook(q, k, v, end), rtol=1e-5, atol=1e-5)
    for part in (out, d_q, d_k, d_v):
        assert (part[0] == 0).all()
        assert np.abs(part[1]).max() > 0.1


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(41, 4, 2), (32, 6, 2), (32, 3, 3), (19, 4, 1)])
def test_attend_on_causal_rows_equals_textbook_attention(implementation, length, heads, kv_heads):
    q, k, v, _ = _inputs(3, 2, length, heads, kv_heads)
    end = np.full((2, length), length, np.int32)
    out = _attend(*(jnp.asarray(x) for x in (q, k, v, end)), implementation, _BLOCK)
    np.testing.assert_allclose(out, _textbook(q, k, v, end), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_attend_on_a_tree_equals_each_branch_alone(implementation):
    """A trunk of 20, two branches of 13 and 14: branch tokens see the trunk and themselves."""
    trunk, first, second = 20, 13, 14
    length = trunk + first + second
    q, k, v, _ = _inputs(4, 1, length)
    end = np.full((1, length), length, np.int32)
    end[0, trunk : trunk + first] = trunk + first
    out = np.asarray(_attend(*(jnp.asarray(x) for x in (q, k, v, end)), implementation, _BLOCK))
    for branch in (range(trunk, trunk + first), range(trunk + first, length)):
        rows = [*range(trunk), *branch]
        causal = np.full((1, len(rows)), len(rows))
        expected = _textbook(q[:, rows], k[:, rows], v[:, rows], causal)
        np.testing.assert_allclose(out[:, rows], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_attend_with_huge_scores_stays_finite(implementation):
    q, k, v, cotangent = _inputs(5, 1, 41)
    out, *grads = _out_and_gradients(300 * q, 300 * k, v, cotangent, jnp.full((1, 41), 41), implementation)
    end = np.full((1, 41), 41)
    np.testing.assert_allclose(out, _textbook(300 * q, 300 * k, v, end), rtol=1e-4, atol=1e-4)
    assert all(np.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize("implementation", ["dense", "blockwise"])
def test_attend_shows_a_nan_that_a_query_sees_and_no_other(implementation):
    """NaN in a value reaches every query that sees its key; queries in earlier blocks stay clean."""
    q, k, v, _ = _inputs(6, 1, 48)
    v[0, 20] = np.nan
    out = np.asarray(_attend(*(jnp.asarray(x) for x in (q, k, v, np.full((1, 48), 48))), implementation, _BLOCK))
    assert np.isnan(out[0, 20:]).all()
    if implementation == "blockwise":
        assert np.isfinite(out[0, :_BLOCK]).all()


def test_attend_in_bfloat16_stays_near_float64():
    q, k, v, _ = _inputs(7, 1, 41)
    half = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    out = _attend(*half, jnp.full((1, 41), 41), "blockwise", _BLOCK)
    assert out.dtype == jnp.bfloat16
    expected = _textbook(*(np.asarray(x, np.float32) for x in half), np.full((1, 41), 41))
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=0.02)  # values are around 1: 2^-8 each way


def test_visible_is_the_mask_in_words():
    end = np.array([[4, 2, 4, 9]])
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    np.testing.assert_array_equal(visible(jnp.asarray(end))[0], np.array(expected, bool))


def test_attend_holds_its_declared_shapes():
    checked = jaxtyping.jaxtyped(typechecker=beartype.beartype)(attend)
    q, k, v, _ = (jnp.asarray(x) for x in _inputs(8, 2, 20))
    end = jnp.full((2, 20), 20, jnp.int32)
    for implementation in ("dense", "blockwise"):
        traced = functools.partial(checked, implementation=implementation, block=_BLOCK)
        assert jax.eval_shape(traced, q, k, v, end).shape == q.shape
    with pytest.raises(jaxtyping.TypeCheckError):
        checked(q, k, v[:, :19], end)
