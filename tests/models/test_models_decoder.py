"""The decoder against `transformers.Qwen3ForCausalLM` with the same weights: values, gradients, packed rows."""

import beartype
import flax.traverse_util
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import torch
from flax import nnx

from actionopd_jax.models import weights
from actionopd_jax.models.decoder import Decoder, rms_norm, rotary
from actionopd_jax.models.logprobs import token_logprobs

pytestmark = pytest.mark.usefixtures("quick_compilation")
_VARIANTS = [
    {"tie_word_embeddings": False, "rope_theta": 1e6},
    {"tie_word_embeddings": True, "rope_theta": 5e6},
]
_TEMPERATURE = 0.6


@pytest.fixture(params=_VARIANTS, ids=["untied-1e6", "tied-5e6"])
def variant(request, checkpoint):
    return checkpoint(**request.param)


def _rows(seed, *lengths):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 97, length).astype(np.int32) for length in lengths]


def _torch_logits(model, row):
    with torch.no_grad():
        return model(torch.tensor(row)[None].long()).logits[0].numpy()


@jax.jit
def _hidden_and_logits(model, tokens, positions, end):
    hidden = model.hidden_states(tokens, positions, end)
    return hidden, jnp.einsum("btd,vd->btv", hidden, model.head_weight(), preferred_element_type=jnp.float32)


def _logits(model, tokens, positions, end):
    arrays = (jnp.asarray(np.atleast_2d(x), jnp.int32) for x in (tokens, positions, end))
    return np.asarray(_hidden_and_logits(model, *arrays)[1])


def _relative(actual, expected):
    return np.abs(actual - expected).max() / np.abs(expected).max()


def test_decoder_logits_equal_pytorch(variant):
    [row] = _rows(1, 40)
    index = np.arange(40)
    expected = _torch_logits(variant.torch_model, row)
    actual = _logits(weights.load(variant.folder), row, index, np.full(40, 40))[0]
    assert _relative(actual, expected) < 1e-5  # measured: 1.3e-6
    assert expected.std() > 0.5  # the comparison says something


def test_decoder_far_positions_equal_pytorch(checkpoint):
    made = checkpoint(**_VARIANTS[0])
    [row] = _rows(2, 24)
    far = 900 + np.arange(24)
    with torch.no_grad():
        output = made.torch_model(torch.tensor(row)[None].long(), position_ids=torch.tensor(far)[None])
    actual = _logits(weights.load(made.folder), row, far, np.full(24, 24))[0]
    assert _relative(actual, output.logits[0].numpy()) < 1e-5  # measured: 1.2e-6


def test_decoder_padded_and_packed_rows_equal_rows_alone(variant):
    """Left padding, right padding, and two rows in one bin: only `positions` and `end` say so."""
    model = weights.load(variant.folder)
    first, second = _rows(3, 17, 15)
    pad = np.full(15, 5, np.int32)
    alone = np.arange(32) + 1  # a padding token sees itself only
    left_end = np.concatenate([alone[:15], np.full(17, 32)])
    right_end = np.concatenate([np.full(17, 17), alone[17:]])
    tokens = np.stack([np.concatenate(parts) for parts in ([pad, first], [first, pad], [first, second])])
    positions = np.stack(
        [
            np.concatenate([np.zeros(15, int), np.arange(17)]),
            np.concatenate([np.arange(17), np.zeros(15, int)]),
            np.concatenate([np.arange(17), np.arange(15)]),
        ]
    )
    end = np.stack([left_end, right_end, np.concatenate([np.full(17, 17), np.full(15, 32)])])
    logits = _logits(model, tokens, positions, end)
    expected_first, expected_second = (_torch_logits(variant.torch_model, row) for row in (first, second))
    assert np.isfinite(logits).all()
    assert _relative(logits[0, 15:], expected_first) < 1e-5
    assert _relative(logits[1, :17], expected_first) < 1e-5
    assert _relative(logits[2, :17], expected_first) < 1e-5
    assert _relative(logits[2, 17:], expected_second) < 1e-5


def _terms(row):
    """Scores every token after the first five, in an order of its own, one of them twice."""
    source = np.concatenate([np.arange(5, len(row) - 1)[::-1], [9]])
    return source.astype(np.int32), row[source + 1]


def test_token_scores_of_a_row_equal_pytorch(variant):
    [row] = _rows(4, 40)
    source, target = _terms(row)
    model = weights.load(variant.folder)
    index = jnp.arange(40)[None]
    hidden, _ = _hidden_and_logits(model, jnp.asarray(row)[None], index, jnp.full((1, 40), 40))
    scores = token_logprobs(hidden, model.head_weight(), jnp.asarray(source)[None], jnp.asarray(target)[None], _TEMPERATURE)
    logits = torch.tensor(_torch_logits(variant.torch_model, row)).double()
    expected = torch.log_softmax(logits / _TEMPERATURE, dim=-1).numpy()
    np.testing.assert_allclose(scores.logprobs[0], expected[source, target], rtol=2e-5, atol=2e-5)
    entropy = -(np.exp(expected) * expected).sum(-1)[source]
    np.testing.assert_allclose(scores.entropy[0], entropy, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(scores.is_argmax[0], expected.argmax(-1)[source] == target)


def _torch_gradients(made, row, source, target, weight, folder):
    """Gradients of all weights, in the decoder's layout: written as a checkpoint of their own and loaded."""
    model = made.torch_model
    model.zero_grad()
    logits = model(torch.tensor(row)[None].long()).logits[0]
    logprobs = torch.log_softmax(logits / _TEMPERATURE, dim=-1)[torch.tensor(source).long(), torch.tensor(target).long()]
    loss = -(torch.tensor(weight) * logprobs).sum()
    loss.backward()
    saved = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.save_pretrained(folder, state_dict=saved)
    return float(loss.detach()), nnx.state(weights.load(folder), nnx.Param)


def test_gradients_of_a_weighted_logprob_loss_equal_autograd_for_all_weights(variant, tmp_path):
    [row] = _rows(5, 40)
    source, target = _terms(row)
    weight = np.random.default_rng(6).normal(size=len(source)).astype(np.float32)
    expected_loss, expected = _torch_gradients(variant, row, source, target, weight, tmp_path)
    remat = variant.torch_model.config.tie_word_embeddings  # one variant with, one without
    graphdef, params = nnx.split(weights.load(variant.folder, remat=remat))

    def loss(params):
        model = nnx.merge(graphdef, params)
        hidden = model.hidden_states(jnp.asarray(row)[None], jnp.arange(40)[None], jnp.full((1, 40), 40))
        terms = (jnp.asarray(source)[None], jnp.asarray(target)[None])
        return -jnp.sum(weight * token_logprobs(hidden, model.head_weight(), *terms, _TEMPERATURE).logprobs)

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, expected_loss, rtol=1e-5)
    actual, wanted = (flax.traverse_util.flatten_dict(nnx.to_pure_dict(tree), sep="/") for tree in (grads, expected))
    assert actual.keys() == wanted.keys()
    for name, grad in actual.items():
        assert np.abs(wanted[name]).max() > 1e-3, name
        assert _relative(grad, wanted[name]) < 1e-5, name  # measured: at most 2e-6


def test_decoder_in_bfloat16_stays_near_pytorch_in_float32(variant):
    """bfloat16 has a relative spacing of 2^-8: one rounding moves a logit by up to 0.4 % of its size."""
    [row] = _rows(7, 40)
    model = weights.load(variant.folder, dtype=jnp.bfloat16)
    index = np.arange(40)
    hidden, logits = _hidden_and_logits(
        model, jnp.asarray(row)[None], jnp.asarray(index)[None], jnp.full((1, 40), 40, jnp.int32)
    )
    assert hidden.dtype == jnp.bfloat16
    assert model.embedding[...].dtype == jnp.float32
    assert _relative(np.asarray(logits[0]), _torch_logits(variant.torch_model, row)) < 0.03  # measured: 0.021


def test_decoder_attention_implementations_agree(checkpoint):
    made = checkpoint(**_VARIANTS[0])
    model = weights.load(made.folder)
    [row] = _rows(8, 50)
    arguments = (row, np.arange(50), np.full(50, 50))
    blockwise = _logits(model, *arguments)
    model.attention_implementation = "dense"
    np.testing.assert_allclose(_logits(model, *arguments), blockwise, rtol=1e-5, atol=1e-5)


def test_num_parameters_equals_pytorch(variant):
    model = weights.load(variant.folder)
    counted = sum(parameter.numel() for parameter in variant.torch_model.parameters())
    assert model.config.num_parameters == counted
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == counted


def test_decoder_initial_weights_have_the_documented_scales(checkpoint):
    config = weights.load(checkpoint(**_VARIANTS[0]).folder).config
    model = Decoder(config, rngs=nnx.Rngs(0))
    assert float(model.embedding[...].std()) == pytest.approx(0.02, rel=0.05)
    assert float(model.layers["down"][...].std()) == pytest.approx(0.02 / 6**0.5, rel=0.05)
    assert (model.layers["query_norm"][...] == 1).all()
    other = Decoder(config, rngs=nnx.Rngs(1))
    assert not np.allclose(model.embedding[...], other.embedding[...])


def test_public_functions_hold_their_declared_shapes(checkpoint):
    model = weights.load(checkpoint(**_VARIANTS[0]).folder)

    def checked(function):
        traced = jaxtyping.jaxtyped(typechecker=beartype.beartype)(function)
        return lambda *arguments: jax.eval_shape(lambda: traced(*arguments))

    tokens = jnp.zeros((2, 6), jnp.int32)
    end = jnp.full((2, 6), 6, jnp.int32)
    assert checked(Decoder.hidden_states)(model, tokens, tokens, end).shape == (2, 6, 48)
    hidden = jnp.zeros((2, 6, 48))
    checked(rotary)(tokens, model.config)
    checked(rms_norm)(hidden, jnp.ones(48), 1e-6)
    checked(token_logprobs)(hidden, model.head_weight(), tokens[:, :3], tokens[:, :3], 0.6)
    with pytest.raises(jaxtyping.TypeCheckError):
        checked(token_logprobs)(hidden, model.head_weight()[:, :5], tokens, tokens, 0.6)
