"""A small decoder and its update, row by row and written from the formulas, for comparison with the real one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from actionopd_jax.config import UpdateConfig
from actionopd_jax.models.decoder import Decoder
from actionopd_jax.models.decoder_config import DecoderConfig
from actionopd_jax.records import Example
from actionopd_jax.training.update import Updater

VOCAB = 48
TEMPERATURE = 0.6
# A large epsilon keeps Adam's step proportional to the gradient, so that weights can be compared.
CONFIG = UpdateConfig(bin_tokens=256, learning_rate=1e-2, adam_eps=1.0, weight_decay=0.1, max_grad_norm=1e9)
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


@functools.cache
def split_model(attention="dense"):
    model = Decoder(DECODER, rngs=nnx.Rngs(0), attention_implementation=attention, remat=False)
    graphdef, params = nnx.split(model)
    # Larger weights than at the start of training: flat distributions would hide mistakes.

    def enlarged(path, param):
        name = jax.tree_util.keystr(path)
        return np.asarray(param) * (25.0 if "embedding" in name else 1.0 if "norm" in name else 8.0)

    return graphdef, jax.tree_util.tree_map_with_path(enlarged, params)


def fresh_params():
    return jax.tree.map(jnp.asarray, split_model()[1])


@functools.cache
def make_updater(config=CONFIG, objective="surrogate", attention="dense"):
    return Updater(split_model(attention)[0], config, temperature=TEMPERATURE, objective=objective)


def trajectory_examples(seed=0, num_decisions=3, num_candidates=3, trajectory="t"):
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


def padded(examples):
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
def dense_logprobs(params, ids):
    """Log-probability of each token of each row (0 for the first), from a plain causal pass."""
    model = nnx.merge(split_model()[0], params)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    hidden = model.hidden_states(ids, positions, jnp.full_like(ids, ids.shape[1]))
    logprobs = jax.nn.log_softmax(hidden @ model.head_weight().T / TEMPERATURE, axis=-1)
    return jnp.pad(jnp.take_along_axis(logprobs[:, :-1], ids[:, 1:, None], axis=-1)[..., 0], ((0, 0), (1, 0)))


def row_logprobs(params, examples):
    ids, inside, _ = padded(examples)
    values = np.asarray(dense_logprobs(params, ids))
    return [row[mask] for row, mask, _ in zip(values, inside, examples, strict=False)]


@jax.jit
def dense_loss(params, ids, inside, weights, old):
    """Written from the formulas."""
    ratio = jnp.exp(jnp.where(inside, dense_logprobs(params, ids) - old, 0))
    h = jnp.minimum(ratio * weights, jnp.clip(ratio, 0.8, 1.2) * weights)
    h = jnp.where(weights < 0, jnp.maximum(h, 3.0 * weights), h)
    return -h.sum() / inside.sum()


def reference_loss(params, examples, old_params):
    arrays = padded(examples)
    return dense_loss(params, *arrays, dense_logprobs(old_params, arrays[0]))


def reference_gradient(examples):
    return jax.grad(reference_loss)(fresh_params(), examples, fresh_params())


def updated(examples, config=CONFIG, objective="surrogate"):
    updater = make_updater(config, objective)
    return updater.update(updater.create_state(fresh_params()), examples)


def gradient_of(examples, config=CONFIG):
    """First Adam moment after one step is 0.1 times the gradient (no clipping)."""
    state, _ = updated(examples, config)
    return jax.tree.map(lambda mu: np.asarray(mu) / 0.1, optax.tree_utils.tree_get(state.opt_state, "mu"))


def assert_close(left, right, tolerance=1e-5):
    scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(right))
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


def first_adamw_step(gradient, learning_rate):
    """Bias-corrected first step with epsilon 1: g / (|g| + 1), and the decay of matrices."""

    def step(path, param, g):
        decay = 0.0 if "norm" in jax.tree_util.keystr(path) else 0.1
        return np.asarray(param) - learning_rate * (np.asarray(g) / (np.abs(g) + 1.0) + decay * np.asarray(param))

    return jax.tree_util.tree_map_with_path(step, fresh_params(), gradient)
