"""The update against a plain loop over rows, and its independence of packing, splitting and order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from row_reference import (
    CONFIG,
    assert_close,
    dense_logprobs,
    first_adamw_step,
    fresh_params,
    gradient_of,
    make_updater,
    padded,
    reference_gradient,
    reference_loss,
    row_logprobs,
    split_model,
    trajectory_examples,
    updated,
)

from actionopd_jax.errors import ConfigError, NumericalError
from actionopd_jax.records import Example
from actionopd_jax.training.update import Updater, split_minibatches, zero_accumulator

TWO_STEPS = dataclasses.replace(CONFIG, minibatch_candidates=3, learning_rate=0.5)


@pytest.fixture(scope="module", autouse=True)
def _quick_compilation():
    """Almost all of the time here is XLA's optimiser at work on programs that run once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize("packing", ["tree", "rows"])
def test_update_gradient_equals_row_by_row_reference(packing):
    examples = trajectory_examples()
    expected = reference_gradient(examples)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected)) > 1e-3
    assert_close(gradient_of(examples, dataclasses.replace(CONFIG, packing=packing)), expected)


def test_update_gradient_is_independent_of_bins_and_micro_batches():
    examples = trajectory_examples(1) + trajectory_examples(2, trajectory="u")
    expected = gradient_of(examples)
    for changes in ({"bin_tokens": 512}, {"packing": "rows", "bins_per_microbatch": 2}):
        assert_close(gradient_of(examples, dataclasses.replace(CONFIG, **changes)), expected)


def test_update_gradient_is_independent_of_row_order():
    examples = trajectory_examples(1) + trajectory_examples(2, trajectory="u")
    shuffled = [examples[i] for i in np.random.default_rng(0).permutation(len(examples))]
    assert_close(gradient_of(shuffled), gradient_of(examples))


def test_update_changes_weights_like_adamw_on_the_reference_gradient():
    gradient = reference_gradient(trajectory_examples())
    state, metrics = updated(trajectory_examples())
    expected = first_adamw_step(gradient, CONFIG.learning_rate)
    for new, old in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(new, old, rtol=0, atol=2e-6)
    norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in jax.tree.leaves(gradient)))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert (int(state.step), int(state.policy_version), int(state.bad_steps)) == (1, 1, 0)


def test_update_with_one_minibatch_has_ratio_exactly_one():
    examples = trajectory_examples()
    _, metrics = updated(examples)
    assert metrics["ratio_mean"] == 1.0
    assert metrics["ratio_max"] == 1.0
    assert metrics["num_tokens"] == sum(len(e.response_ids) for e in examples)
    assert metrics["optimizer_steps"] == 1
    assert metrics["token_ratio"] > 1.5
    mean_weight = np.concatenate([e.weights for e in examples]).mean()
    assert metrics["loss"] == pytest.approx(-mean_weight, abs=1e-6)


def test_score_equals_row_by_row_logprobs():
    examples = trajectory_examples()
    updater = make_updater()
    bins = updater.pack(examples)
    scores = updater.score(fresh_params(), bins)
    expected = bins.gather(row_logprobs(fresh_params(), examples))
    np.testing.assert_allclose(scores.logprobs[bins.active], expected[bins.active], atol=2e-5)
    assert (scores.entropy[bins.active] > 0).all()


def test_update_with_two_minibatches_keeps_the_old_logprobs_of_before():
    examples = trajectory_examples(1, num_decisions=2)
    updater = make_updater(TWO_STEPS)
    state, metrics = updater.update(updater.create_state(fresh_params()), examples)
    assert metrics["optimizer_steps"] == 2
    assert int(state.policy_version) == 2
    # By hand: two steps on three rows each, ratios against the weights before both.
    first = first_adamw_step(reference_gradient(examples[:3]), TWO_STEPS.learning_rate)
    old, new = (np.concatenate(row_logprobs(params, examples[3:])) for params in (fresh_params(), first))
    num_first, num_second = (sum(len(e.weights) for e in part) for part in (examples[:3], examples[3:]))
    ratios = np.concatenate([np.ones(num_first), np.exp(new - old)])
    assert metrics["ratio_max"] == pytest.approx(ratios.max(), rel=1e-4)
    assert metrics["ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-4)
    assert abs(ratios.max() - 1) > 0.01
    expected = float(reference_loss(first, examples[3:], fresh_params())) * num_second
    expected -= sum(float(e.weights.sum()) for e in examples[:3])
    assert metrics["loss"] == pytest.approx(expected / len(ratios), abs=1e-5)


def test_accumulate_with_scored_old_logprobs_has_ratio_one():
    updater = make_updater(TWO_STEPS)
    bins = updater.pack(trajectory_examples(1, num_decisions=1))
    bins = bins.with_old_logprobs(updater.score(fresh_params(), bins).logprobs)
    (micro,) = updater._micro_batches(bins)
    total, _ = updater.accumulate(zero_accumulator(fresh_params()), fresh_params(), micro, unchanged_weights=False)
    sums = total.sums.surrogate
    assert float(sums.ratio_max) == pytest.approx(1, abs=1e-5)
    assert float(sums.ratio / sums.num_active) == pytest.approx(1, abs=1e-5)


def test_update_reports_mismatch_with_the_sampler():
    examples = trajectory_examples()
    behaviour = row_logprobs(fresh_params(), examples)
    behaviour[2] = behaviour[2].copy()
    behaviour[2][0] += 0.5
    examples = [dataclasses.replace(e, behaviour_logprobs=row) for e, row in zip(examples, behaviour, strict=True)]
    _, metrics = updated(examples)
    assert metrics["mismatch_max"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["mismatch_mean"] == pytest.approx(0.5 / metrics["num_tokens"], rel=0.1)


def test_update_likelihood_has_the_gradient_of_the_weighted_nll():
    examples = trajectory_examples()
    state, metrics = updated(examples, objective="likelihood")

    ids, inside, weights = padded(examples)

    def nll(params):
        return -(jnp.where(inside, dense_logprobs(params, ids), 0) * weights).sum() / inside.sum()

    loss, gradient = jax.value_and_grad(nll)(fresh_params())
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-4)
    moments = jax.tree.map(lambda mu: np.asarray(mu) / 0.1, optax.tree_utils.tree_get(state.opt_state, "mu"))
    assert_close(moments, gradient)


def test_update_without_examples_only_counts_the_step():
    updater = make_updater()
    state = updater.create_state(fresh_params())
    after, metrics = updater.update(state, [])
    assert (int(after.step), int(after.policy_version)) == (1, 0)
    assert all(value == 0 for value in metrics.values())
    for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(fresh_params()), strict=True):
        np.testing.assert_array_equal(a, b)


def _with_nan_advantage():
    examples = trajectory_examples()
    weights = np.full_like(examples[0].weights, np.nan)
    return [dataclasses.replace(examples[0], weights=weights), *examples[1:]]


def test_update_with_nan_gradient_leaves_weights_and_moments():
    updater = make_updater()
    state, _ = updater.update(updater.create_state(fresh_params()), trajectory_examples())
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, metrics = updater.update(state, _with_nan_advantage())
    assert metrics["bad_steps"] == 1
    assert np.isnan(metrics["grad_norm"])
    assert (int(state.step), int(state.policy_version)) == (2, 1)
    for a, b in zip(jax.tree.leaves((state.params, state.opt_state)), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(a, b)


def test_update_stops_after_too_many_bad_steps():
    updater = make_updater()
    state = updater.create_state(fresh_params())
    for _ in range(CONFIG.max_bad_steps - 1):
        state, _ = updater.update(state, _with_nan_advantage())
    with pytest.raises(NumericalError, match="max_bad_steps"):
        updater.update(state, _with_nan_advantage())


def test_update_compiles_nothing_new_for_a_known_shape():
    updater = make_updater()
    state = updater.create_state(fresh_params())
    state, _ = updater.update(state, trajectory_examples(0))
    compiled = updater.accumulate._cache_size(), updater.apply._cache_size()
    updater.update(state, trajectory_examples(5))
    assert (updater.accumulate._cache_size(), updater.apply._cache_size()) == compiled


def test_updater_refuses_greedy_temperature():
    with pytest.raises(ConfigError, match="temperature"):
        Updater(split_model()[0], CONFIG, temperature=0.0)


def test_split_minibatches_keeps_groups_whole():
    sizes = {"a": 3, "b": 4, "c": 2, "d": 4}
    names = [name for name, size in sizes.items() for _ in range(size)]
    ids = np.zeros(1, np.int32)
    examples = [Example(ids, ids, np.zeros(1, np.float32), name, "t") for name in names]
    for by in ("groups", "trajectories"):
        config = dataclasses.replace(CONFIG, minibatch_candidates=6, minibatch_by=by)
        # The trajectory is larger than a minibatch.
        assert split_minibatches(examples, config) == [[0, 1, 2], [3, 4, 5, 6, 7, 8], [9, 10, 11, 12]]
        assert split_minibatches([], config) == []
        with pytest.raises(ConfigError, match="group b"):
            split_minibatches(examples, dataclasses.replace(config, minibatch_candidates=3))


def test_split_minibatches_keeps_trajectories_whole_where_they_fit():
    ids = np.zeros(1, np.int32)
    names = [("a", "s"), ("b", "s"), ("a", "t"), ("b", "t"), ("c", "t"), ("a", "u")]
    examples = [Example(ids, ids, np.zeros(1, np.float32), *name) for name in names for _ in range(2)]
    config = dataclasses.replace(CONFIG, minibatch_candidates=8)
    assert split_minibatches(examples, config) == [[0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11]]
    by_groups = dataclasses.replace(config, minibatch_by="groups")
    assert split_minibatches(examples, by_groups) == [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11]]
