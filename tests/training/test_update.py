"""The update against a plain loop over rows, and its independence of packing, splitting and order."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from actionopd_jax.config import UpdateConfig
from actionopd_jax.errors import ConfigError, NumericalError
from actionopd_jax.models.decoder import Decoder
from actionopd_jax.models.decoder_config import DecoderConfig
from actionopd_jax.records import Example
from actionopd_jax.training.update import Updater, split_minibatches, zero_accumulator

VOCAB = 48
TEMPERATURE = 0.6
# A large epsilon keeps Adam's step proportional to the gradient, so that weights can be compared.
CONFIG = UpdateConfig(bin_tokens=256, learning_rate=1e-2, adam_eps=1.0, weight_decay=0.1, max_grad_norm=1e9)
TWO_STEPS = dataclasses.replace(CONFIG, minibatch_candidates=3, learning_rate=0.5)
DECODER = DecoderConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    tie_word_embeddings=True,
    max_position_embeddings=512,
)


@pytest.fixture(scope="module", autouse=True)
def _quick_compilation():
    """Almost all of the time here is XLA's optimiser at work on programs that run once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def _split_model():
    model = Decoder(DECODER, rngs=nnx.Rngs(0), attention_implementation="dense", remat=False)
    graphdef, params = nnx.split(model)
    # Larger weights than at the start of training: flat distributions would hide mistakes.

    def enlarged(path, param):
        name = jax.tree_util.keystr(path)
        return np.asarray(param) * (25.0 if "embedding" in name else 1.0 if "norm" in name else 8.0)

    return graphdef, jax.tree_util.tree_map_with_path(enlarged, params)


def _params():
    return jax.tree.map(jnp.asarray, _split_model()[1])


@functools.cache
def _updater(config=CONFIG, objective="surrogate"):
    return Updater(_split_model()[0], config, temperature=TEMPERATURE, objective=objective)


def _examples(seed=0, num_decisions=3, num_candidates=3, trajectory="t"):
    """One trajectory: later prompts extend earlier ones by a response; lengths vary a lot; one duplicate row."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, VOCAB, 11)
    examples = []
    for decision in range(num_decisions):
        responses = [rng.integers(0, VOCAB, rng.integers(1, 40)) for _ in range(num_candidates - 1)]
        responses.append(responses[0])
        for response in responses:
            weights = rng.normal(size=len(response))
            ids = (np.asarray(part, np.int32) for part in (prompt, response))
            examples.append(Example(*ids, weights.astype(np.float32), f"g{decision}", trajectory))
        prompt = np.concatenate([prompt, responses[0], rng.integers(0, VOCAB, 3)])
    return examples


ROWS, ROW_TOKENS = 18, 192  # one shape for every reference computation


def _padded(examples):
    """Rows side by side, each alone: ids, and where its response lies."""
    ids = np.zeros((ROWS, ROW_TOKENS), np.int32)
    inside = np.zeros((ROWS, ROW_TOKENS), bool)
    weights = np.zeros((ROWS, ROW_TOKENS), np.float32)
    for i, example in enumerate(examples):
        first, last = len(example.prompt_ids), len(example.prompt_ids) + len(example.response_ids)
        ids[i, :first], ids[i, first:last] = example.prompt_ids, example.response_ids
        inside[i, first:last], weights[i, first:last] = True, example.weights
    return ids, inside, weights


@jax.jit
def _dense_logprobs(params, ids):
    """Log-probability of each token of each row (0 for the first), from a plain causal pass."""
    model = nnx.merge(_split_model()[0], params)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    hidden = model.hidden_states(ids, positions, jnp.full_like(ids, ids.shape[1]))
    logprobs = jax.nn.log_softmax(hidden @ model.head_weight().T / TEMPERATURE, axis=-1)
    return jnp.pad(jnp.take_along_axis(logprobs[:, :-1], ids[:, 1:, None], axis=-1)[..., 0], ((0, 0), (1, 0)))


def _row_logprobs(params, examples):
    ids, inside, _ = _padded(examples)
    values = np.asarray(_dense_logprobs(params, ids))
    return [row[mask] for row, mask, _ in zip(values, inside, examples, strict=False)]


@jax.jit
def _dense_loss(params, ids, inside, weights, old):
    """Written from the formulas."""
    ratio = jnp.exp(jnp.where(inside, _dense_logprobs(params, ids) - old, 0))
    h = jnp.minimum(ratio * weights, jnp.clip(ratio, 0.8, 1.2) * weights)
    h = jnp.where(weights < 0, jnp.maximum(h, 3.0 * weights), h)
    return -h.sum() / inside.sum()


def _reference_loss(params, examples, old_params):
    padded = _padded(examples)
    return _dense_loss(params, *padded, _dense_logprobs(old_params, padded[0]))


def _reference_gradient(examples):
    return jax.grad(_reference_loss)(_params(), examples, _params())


def _updated(examples, config=CONFIG, objective="surrogate"):
    updater = _updater(config, objective)
    return updater.update(updater.create_state(_params()), examples)


def _gradient(examples, config=CONFIG):
    """First Adam moment after one step is 0.1 times the gradient (no clipping)."""
    state, _ = _updated(examples, config)
    return jax.tree.map(lambda mu: np.asarray(mu) / 0.1, optax.tree_utils.tree_get(state.opt_state, "mu"))


def _assert_close(left, right, tolerance=1e-5):
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(right))
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("packing", ["tree", "rows"])
def test_update_gradient_equals_row_by_row_reference(packing):
    examples = _examples()
    expected = _reference_gradient(examples)
    assert max(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected)) > 1e-3
    _assert_close(_gradient(examples, dataclasses.replace(CONFIG, packing=packing)), expected)


def test_update_gradient_is_independent_of_bins_and_micro_batches():
    examples = _examples(1) + _examples(2, trajectory="u")
    expected = _gradient(examples)
    for changes in ({"bin_tokens": 512}, {"packing": "rows", "bins_per_microbatch": 2}):
        _assert_close(_gradient(examples, dataclasses.replace(CONFIG, **changes)), expected)


def test_update_gradient_is_independent_of_row_order():
    examples = _examples(1) + _examples(2, trajectory="u")
    shuffled = [examples[i] for i in np.random.default_rng(0).permutation(len(examples))]
    _assert_close(_gradient(shuffled), _gradient(examples))


def _first_adamw_step(gradient, learning_rate):
    """Bias-corrected first step with epsilon 1: g / (|g| + 1), and the decay of matrices."""

    def step(path, param, g):
        decay = 0.0 if "norm" in jax.tree_util.keystr(path) else 0.1
        return np.asarray(param) - learning_rate * (np.asarray(g) / (np.abs(g) + 1.0) + decay * np.asarray(param))

    return jax.tree_util.tree_map_with_path(step, _params(), gradient)


def test_update_changes_weights_like_adamw_on_the_reference_gradient():
    gradient = _reference_gradient(_examples())
    state, metrics = _updated(_examples())
    expected = _first_adamw_step(gradient, CONFIG.learning_rate)
    for new, old in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(new, old, rtol=0, atol=2e-6)
    norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in jax.tree.leaves(gradient)))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert (int(state.step), int(state.policy_version), int(state.bad_steps)) == (1, 1, 0)


def test_update_with_one_minibatch_has_ratio_exactly_one():
    examples = _examples()
    _, metrics = _updated(examples)
    assert metrics["ratio_mean"] == 1.0
    assert metrics["ratio_max"] == 1.0
    assert metrics["num_tokens"] == sum(len(e.response_ids) for e in examples)
    assert metrics["optimizer_steps"] == 1
    assert metrics["token_ratio"] > 1.5
    mean_weight = np.concatenate([e.weights for e in examples]).mean()
    assert metrics["loss"] == pytest.approx(-mean_weight, abs=1e-6)


def test_score_equals_row_by_row_logprobs():
    examples = _examples()
    updater = _updater()
    bins = updater.pack(examples)
    scores = updater.score(_params(), bins)
    expected = bins.gather(_row_logprobs(_params(), examples))
    np.testing.assert_allclose(scores.logprobs[bins.active], expected[bins.active], atol=2e-5)
    assert (scores.entropy[bins.active] > 0).all()


def test_update_with_two_minibatches_keeps_the_old_logprobs_of_before():
    examples = _examples(1, num_decisions=2)
    updater = _updater(TWO_STEPS)
    state, metrics = updater.update(updater.create_state(_params()), examples)
    assert metrics["optimizer_steps"] == 2
    assert int(state.policy_version) == 2
    # By hand: two steps on three rows each, ratios against the weights before both.
    first = _first_adamw_step(_reference_gradient(examples[:3]), TWO_STEPS.learning_rate)
    old, new = (np.concatenate(_row_logprobs(params, examples[3:])) for params in (_params(), first))
    num_first, num_second = (sum(len(e.weights) for e in part) for part in (examples[:3], examples[3:]))
    ratios = np.concatenate([np.ones(num_first), np.exp(new - old)])
    assert metrics["ratio_max"] == pytest.approx(ratios.max(), rel=1e-4)
    assert metrics["ratio_mean"] == pytest.approx(ratios.mean(), rel=1e-4)
    assert abs(ratios.max() - 1) > 0.01
    expected = float(_reference_loss(first, examples[3:], _params())) * num_second
    expected -= sum(float(e.weights.sum()) for e in examples[:3])
    assert metrics["loss"] == pytest.approx(expected / len(ratios), abs=1e-5)


def test_accumulate_with_scored_old_logprobs_has_ratio_one():
    updater = _updater(TWO_STEPS)
    bins = updater.pack(_examples(1, num_decisions=1))
    bins = bins.with_old_logprobs(updater.score(_params(), bins).logprobs)
    (micro,) = updater._micro_batches(bins)
    total, _ = updater.accumulate(zero_accumulator(_params()), _params(), micro, unchanged_weights=False)
    sums = total.sums.surrogate
    assert float(sums.ratio_max) == pytest.approx(1, abs=1e-5)
    assert float(sums.ratio / sums.num_active) == pytest.approx(1, abs=1e-5)


def test_update_reports_mismatch_with_the_sampler():
    examples = _examples()
    behaviour = _row_logprobs(_params(), examples)
    behaviour[2] = behaviour[2].copy()
    behaviour[2][0] += 0.5
    examples = [dataclasses.replace(e, behaviour_logprobs=row) for e, row in zip(examples, behaviour, strict=True)]
    _, metrics = _updated(examples)
    assert metrics["mismatch_max"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["mismatch_mean"] == pytest.approx(0.5 / metrics["num_tokens"], rel=0.1)


def test_update_likelihood_has_the_gradient_of_the_weighted_nll():
    examples = _examples()
    state, metrics = _updated(examples, objective="likelihood")

    ids, inside, weights = _padded(examples)

    def nll(params):
        return -(jnp.where(inside, _dense_logprobs(params, ids), 0) * weights).sum() / inside.sum()

    loss, gradient = jax.value_and_grad(nll)(_params())
    assert metrics["loss"] == pytest.approx(float(loss), rel=1e-4)
    moments = jax.tree.map(lambda mu: np.asarray(mu) / 0.1, optax.tree_utils.tree_get(state.opt_state, "mu"))
    _assert_close(moments, gradient)


def test_update_without_examples_only_counts_the_step():
    updater = _updater()
    state = updater.create_state(_params())
    after, metrics = updater.update(state, [])
    assert (int(after.step), int(after.policy_version)) == (1, 0)
    assert all(value == 0 for value in metrics.values())
    for a, b in zip(jax.tree.leaves(after.params), jax.tree.leaves(_params()), strict=True):
        np.testing.assert_array_equal(a, b)


def _with_nan_advantage():
    examples = _examples()
    weights = np.full_like(examples[0].weights, np.nan)
    return [dataclasses.replace(examples[0], weights=weights), *examples[1:]]


def test_update_with_nan_gradient_leaves_weights_and_moments():
    updater = _updater()
    state, _ = updater.update(updater.create_state(_params()), _examples())
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, metrics = updater.update(state, _with_nan_advantage())
    assert metrics["bad_steps"] == 1
    assert np.isnan(metrics["grad_norm"])
    assert (int(state.step), int(state.policy_version)) == (2, 1)
    for a, b in zip(jax.tree.leaves((state.params, state.opt_state)), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(a, b)


def test_update_stops_after_too_many_bad_steps():
    updater = _updater()
    state = updater.create_state(_params())
    for _ in range(CONFIG.max_bad_steps - 1):
        state, _ = updater.update(state, _with_nan_advantage())
    with pytest.raises(NumericalError, match="max_bad_steps"):
        updater.update(state, _with_nan_advantage())


def test_update_compiles_nothing_new_for_a_known_shape():
    updater = _updater()
    state = updater.create_state(_params())
    state, _ = updater.update(state, _examples(0))
    compiled = updater.accumulate._cache_size(), updater.apply._cache_size()
    updater.update(state, _examples(5))
    assert (updater.accumulate._cache_size(), updater.apply._cache_size()) == compiled


def test_updater_refuses_greedy_temperature():
    with pytest.raises(ConfigError, match="temperature"):
        Updater(_split_model()[0], CONFIG, temperature=0.0)


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
