"""Packed bins against rows taken one by one: the mask, positions, gathers, and a loss with its gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from forests import MAX_ROWS, forests, make_example
from hypothesis import given, settings
from hypothesis import strategies as st

from actionopd_jax.errors import PackingError
from actionopd_jax.learning.packing import pack
from actionopd_jax.learning.prefix_tree import common_prefix, lay_out, sort_rows
from actionopd_jax.learning.surrogate import dual_clipped_surrogate


def _row(example):
    return np.concatenate([example.prompt_ids, example.response_ids])


def _check_bins(examples, bins):
    """Every term sees exactly its row's prefix, once, at the right positions; nothing is lost."""
    num_bins, length = bins.tokens.shape
    index = np.arange(length)
    seen = set()
    for b in range(num_bins):
        visible = (index[None, :] <= index[:, None]) & (index[:, None] < bins.end[b][None, :])
        assert visible.diagonal().all()  # nobody's softmax is empty
        for term in np.flatnonzero(bins.active[b]):
            example, t = examples[bins.row[b, term]], bins.offset[b, term]
            seen.add((int(bins.row[b, term]), int(t)))
            row, depth = _row(example), len(example.prompt_ids) + t
            keys = np.flatnonzero(visible[bins.source[b, term]])
            np.testing.assert_array_equal(bins.tokens[b, keys], row[:depth])
            np.testing.assert_array_equal(bins.positions[b, keys], np.arange(depth))
            assert bins.target[b, term] == row[depth]
            assert bins.weight[b, term] == example.weights[t]
    expected = {(i, t) for i, example in enumerate(examples) for t in range(len(example.response_ids))}
    assert seen == expected
    assert bins.active.sum() == len(expected) == bins.stats.num_terms
    assert (bins.weight[~bins.active] == 0).all()


def _trie_size(examples):
    return len({tuple(_row(e)[: i + 1]) for e in examples for i in range(len(_row(e)))})


@settings(max_examples=150, deadline=None)
@given(forests(), st.sampled_from([128, 256, 1024]), st.sampled_from(["tree", "rows"]), st.integers(1, 3))
def test_pack_gives_every_term_its_row(examples, bin_tokens, mode, multiple):
    examples = [dataclasses.replace(e, weights=np.arange(1, len(e.weights) + 1, dtype=np.float32)) for e in examples]
    bins = pack(examples, bin_tokens, mode=mode, bins_multiple=multiple)
    _check_bins(examples, bins)
    assert bins.num_bins % multiple == 0
    stats = bins.stats
    distinct = _trie_size(examples) if mode == "tree" else stats.row_tokens
    assert stats.row_tokens == sum(len(_row(e)) for e in examples)
    assert stats.packed_tokens == distinct + stats.repeated_tokens
    assert stats.slots == bins.tokens.size
    if mode == "rows":
        assert stats.repeated_tokens == 0


@settings(max_examples=50, deadline=None)
@given(forests())
def test_pack_uncut_tree_holds_each_distinct_prefix_once(examples):
    bins = pack(examples, 2048, bucketed=False)
    if _trie_size(examples) <= 2048:
        assert bins.num_bins == 1
        assert bins.stats.packed_tokens == _trie_size(examples) + bins.stats.repeated_tokens


@settings(max_examples=50, deadline=None)
@given(forests(), st.randoms(use_true_random=False))
def test_pack_is_independent_of_row_order(examples, random):
    order = list(range(len(examples)))
    random.shuffle(order)
    first, second = pack(examples, 256), pack([examples[i] for i in order], 256)
    for name in ("tokens", "positions", "end", "active"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert first.stats == second.stats


def test_lay_out_of_a_known_tree_by_hand():
    #  1 - 2 - 3        rows: [1,2,3] [1,2,4,5] [1,6] [1,6] [1,6,7]
    #     \   \- 4 - 5
    #      6 - 7
    rows = [np.array(r, np.int32) for r in ([1, 6, 7], [1, 2, 4, 5], [1, 6], [1, 2, 3], [1, 6])]
    ordered = sort_rows(rows)
    assert ordered.order == (3, 1, 2, 4, 0)
    assert ordered.shared.tolist() == [0, 2, 1, 2, 2]
    tree = lay_out([rows[i] for i in ordered.order], ordered.shared.tolist(), [0] * 5)
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert tree.positions.tolist() == [0, 1, 2, 2, 3, 1, 2]
    assert tree.end.tolist() == [7, 5, 3, 5, 5, 7, 7]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2], [0, 1, 3, 4], [0, 5], [0, 5], [0, 5, 6]]


def test_sort_rows_compares_ids_not_bytes():
    rows = [np.array([256], np.int32), np.array([1, 9], np.int32), np.array([255], np.int32), np.array([1], np.int32)]
    assert sort_rows(rows).order == (3, 1, 2, 0)
    assert common_prefix(rows[1], rows[3]) == 1


def test_pack_cuts_where_few_tokens_repeat():
    # Two trajectories that share 4 tokens, each with 8 rows over a prompt of 100: no bin holds both.
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 1000, 4)
    examples = []
    for t in range(2):
        prompt = np.concatenate([shared, [2000 + t], rng.integers(0, 1000, 95)])
        examples += [make_example(prompt, rng.integers(0, 1000, 10), group=f"{t}") for _ in range(8)]
    bins = pack(examples, 256)
    assert bins.stats.packed_tokens == 2 * (100 + 80)
    assert bins.stats.repeated_tokens == 4
    assert bins.num_bins == 2


def test_pack_small_batch_uses_a_small_bin():
    examples = [make_example([1, 2, 3], [4, 5])]
    assert pack(examples, 4096).tokens.shape == (1, 256)
    assert pack(examples, 4096, bucketed=False).tokens.shape == (1, 4096)


def test_pack_refuses_a_row_longer_than_a_bin():
    fits = make_example([1] * 100, [2] * 28)
    assert pack([fits], 128).num_bins == 1
    with pytest.raises(PackingError, match=r"129 tokens.*group g7, trajectory t9"):
        pack([fits, make_example([1] * 100, [2] * 29, group="g7", trajectory="t9")], 128)
    with pytest.raises(ValueError, match="no examples"):
        pack([], 128)


def test_gather_arranges_values_like_the_terms():
    examples = [make_example([1, 2], [3, 4, 5]), make_example([1], [2, 3]), make_example([1, 2], [3, 4, 5])]
    bins = pack(examples, 128)
    arranged = bins.gather([np.array([0.0, 1, 2]), np.array([10.0, 11]), np.array([20.0, 21, 22])])
    np.testing.assert_array_equal(arranged, np.where(bins.active, bins.row * 10 + bins.offset, 0))


# -- a small attention model in double precision: the same loss and gradients in every layout ----------


_ROWS = 16
assert _ROWS >= MAX_ROWS


def _rotated(x, angle):
    first, second = x[:, :4], x[:, 4:]
    return jnp.concatenate(
        [first * jnp.cos(angle) - second * jnp.sin(angle), second * jnp.cos(angle) + first * jnp.sin(angle)], axis=-1
    )


@functools.partial(jax.vmap, in_axes=(None, 0, 0, 0))
def _forward(params, tokens, positions, end):
    """Two layers of softmax attention with rotated positions; logits `[T, V]`."""
    x = params["embedding"][tokens]
    index = jnp.arange(len(tokens))
    visible = (index[None, :] <= index[:, None]) & (index[:, None] < end[None, :])
    angle = positions[:, None] * jnp.array([1.0, 0.1, 0.01, 0.001])
    for layer in params["layers"]:
        q, k, v = (x @ layer[name] for name in ("q", "k", "v"))
        q, k = _rotated(q, angle), _rotated(k, angle)
        weights = jax.nn.softmax(jnp.where(visible, q @ k.T, -jnp.inf), axis=-1)
        x = jnp.tanh(x + weights @ v)
    return x @ params["embedding"].T


def _double_params(vocab):
    rng = np.random.default_rng(0)
    layers = [{name: jnp.asarray(rng.normal(size=(8, 8)) * 0.5) for name in "qkv"} for _ in range(2)]
    return {"embedding": jnp.asarray(rng.normal(size=(vocab, 8))), "layers": layers}


@jax.jit
@jax.value_and_grad
def _bins_loss(params, arrays, weight, old):
    logprobs = jax.nn.log_softmax(_forward(params, arrays["tokens"], arrays["positions"], arrays["end"]))
    of_source = jnp.take_along_axis(logprobs, arrays["source"][..., None], axis=1)
    new = jnp.take_along_axis(of_source, arrays["target"][..., None], axis=-1)[..., 0]
    sums = dual_clipped_surrogate(new, old, weight, arrays["active"], 0.2, 3.0)
    return -sums.objective / sums.num_active


@jax.jit
@jax.value_and_grad
def _rows_loss(params, rows, inside, weight, old):
    """Each row alone, padded at its end; term t of a row stands where its target stands."""
    positions = jnp.broadcast_to(jnp.arange(rows.shape[1]), rows.shape)
    logprobs = jax.nn.log_softmax(_forward(params, rows, positions, jnp.full_like(rows, rows.shape[1])))
    new = jnp.take_along_axis(logprobs[:, :-1], rows[:, 1:, None], axis=-1)[..., 0]
    inside, weight, old = inside[:, 1:], weight[:, 1:], old[:, 1:]
    ratio = jnp.exp(jnp.where(inside, new - old, 0))
    h = jnp.minimum(ratio * weight, jnp.clip(ratio, 0.8, 1.2) * weight)
    return -jnp.where(weight < 0, jnp.maximum(h, 3 * weight), h).sum() / inside.sum()


def _dense_rows(examples, old):
    rows = np.zeros((_ROWS, 128), np.int32)
    inside, weight, old_rows = np.zeros(rows.shape, bool), np.zeros(rows.shape), np.zeros(rows.shape)
    for i, example in enumerate(examples):
        row = _row(example)
        here = slice(len(example.prompt_ids), len(row))
        rows[i, : len(row)], inside[i, here], weight[i, here], old_rows[i, here] = row, True, example.weights, old[i]
    return rows, inside, weight, old_rows


def _grown_examples(rng):
    prompt, examples = rng.integers(0, 9, 5), []
    for decision in range(4):
        responses = [rng.integers(0, 9, n) for n in (1, 25, 7)]
        responses.append(responses[2])
        examples += [make_example(prompt, y, rng.normal(size=len(y)), f"g{decision}") for y in responses]
        prompt = np.concatenate([prompt, responses[1], rng.integers(0, 9, 2)])
    return examples


def _expect_equal_in_double_precision(examples, mode, bin_tokens):
    """Loss, gradients and one AdamW step against row by row; one shape whatever the examples are."""
    rng = np.random.default_rng(len(examples))
    examples = [dataclasses.replace(e, weights=rng.normal(size=len(e.weights)).astype(np.float32)) for e in examples]
    old = [-2.2 + 0.3 * rng.normal(size=len(e.weights)) for e in examples]
    starts = np.concatenate([[0], np.cumsum([len(row) for row in old])])
    bins = pack(examples, bin_tokens, mode=mode, bins_multiple=_ROWS * 128 // bin_tokens, bucketed=False)
    arrays = {name: getattr(bins, name) for name in ("tokens", "positions", "end", "source", "target", "active")}
    old_bins = np.concatenate(old)[np.where(bins.active, starts[bins.row] + bins.offset, 0)]
    with jax.enable_x64(True):
        params = _double_params(9)
        expected = _rows_loss(params, *_dense_rows(examples, old))
        result = _bins_loss(params, arrays, bins.weight.astype(np.float64), old_bins)
        steps = [_adamw_step(params, grads) for _, grads in (result, expected)]
        for got, wanted in zip(jax.tree.leaves((result, steps[0])), jax.tree.leaves((expected, steps[1])), strict=True):
            assert got.dtype == jnp.float64
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-9)
    return max(float(np.abs(g).max()) for g in jax.tree.leaves(expected[1]))


def _adamw_step(params, grads):
    optimizer = optax.adamw(1e-2, eps=1e-6, weight_decay=0.1)
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return optax.apply_updates(params, updates)


@settings(max_examples=60, deadline=None)
@given(forests(), st.sampled_from([("tree", 512), ("tree", 128), ("rows", 256)]))
def test_pack_random_forests_equal_row_by_row_in_double_precision(examples, layout):
    _expect_equal_in_double_precision(examples, *layout)


def test_pack_trajectory_equals_row_by_row_in_double_precision():
    examples = _grown_examples(np.random.default_rng(3))
    for layout in (("tree", 512), ("tree", 128), ("rows", 256)):
        assert _expect_equal_in_double_precision(examples, *layout) > 1e-2
