import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from actionopd_jax.models import logprobs
from actionopd_jax.models.logprobs import token_logprobs

TEMPERATURE = 0.7


def random_terms(seed, batch, length, terms, width, vocabulary):
    """Hidden states, head, sources, targets (every second one the arg-max) and weights of the log-probabilities."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(batch, length, width)).astype(np.float32)
    head = rng.normal(size=(vocabulary, width)).astype(np.float32)
    source = rng.integers(0, length, (batch, terms)).astype(np.int32)
    target = rng.integers(0, vocabulary, (batch, terms)).astype(np.int32)
    best = (np.take_along_axis(hidden, source[..., None], axis=1) @ head.T).argmax(axis=-1)
    target[:, ::2] = best[:, ::2]
    return hidden, head, source, target, rng.normal(size=(batch, terms)).astype(np.float32)


def plain_scores(hidden, head, source, target, weights):
    """Scores, and gradients of the weighted sum of log-probabilities by hidden states and head, in float64."""
    hidden, head = hidden.astype(np.float64), head.astype(np.float64)
    rows = np.take_along_axis(hidden, source[..., None], axis=1)
    logits = rows @ head.T / TEMPERATURE
    peak = logits.max(axis=-1, keepdims=True)
    log_total = np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True)) + peak
    log_p = logits - log_total
    p = np.exp(log_p)
    chosen = np.take_along_axis(log_p, target[..., None], axis=-1)[..., 0]
    d_logits = -p * weights[..., None] / TEMPERATURE
    for b, i in np.ndindex(*target.shape):
        d_logits[b, i, target[b, i]] += weights[b, i] / TEMPERATURE
    d_hidden = np.zeros_like(hidden)
    for b in range(source.shape[0]):
        np.add.at(d_hidden[b], source[b], d_logits[b] @ head)
    d_head = np.einsum("blv,bld->vd", d_logits, rows)
    return (chosen, -(p * log_p).sum(axis=-1), logits.argmax(axis=-1) == target), (d_hidden, d_head)


def scores_and_gradients(hidden, head, source, target, weights):
    def loss(hidden, head):
        scores = token_logprobs(hidden, head, source, target, TEMPERATURE)
        return jnp.sum(scores.logprobs * weights), scores

    (_, scores), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(hidden, head)
    return scores, grads


@pytest.mark.parametrize(
    ("chunk", "vocabulary_chunk", "terms", "vocabulary"),
    [(512, 8192, 7, 50), (16, 64, 21, 1000), (10, 999, 5, 1000), (3, 7, 4, 36)],
    ids=["one chunk", "uneven chunks", "two vocabulary chunks", "tiny chunks"],
)
def test_token_logprobs_matches_plain_float64(monkeypatch, chunk, vocabulary_chunk, terms, vocabulary):
    monkeypatch.setattr(logprobs, "TOKENS", chunk)
    monkeypatch.setattr(logprobs, "VOCABULARY", vocabulary_chunk)
    inputs = random_terms(terms, 2, 9, terms, 16, vocabulary)
    scores, grads = scores_and_gradients(*inputs)
    expected, expected_grads = plain_scores(*inputs)
    np.testing.assert_allclose(scores.logprobs, expected[0], atol=1e-5)
    np.testing.assert_allclose(scores.entropy, expected[1], atol=1e-5)
    np.testing.assert_array_equal(scores.is_argmax, expected[2])
    for grad, plain in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(grad, plain, atol=1e-6 * np.abs(plain).max())


def test_token_logprobs_equal_logits_pick_the_lowest_id(monkeypatch):
    monkeypatch.setattr(logprobs, "VOCABULARY", 4)
    head = np.zeros((10, 2), np.float32)
    head[[3, 5, 9], 0] = 1.0  # in three chunks, of which the last is drawn back over the second
    hidden = np.ones((1, 1, 2), np.float32)
    target = np.asarray([[3, 5, 9]], np.int32)
    scores = token_logprobs(hidden, head, np.zeros((1, 3), np.int32), target, 1.0)
    assert scores.is_argmax.tolist() == [[True, False, False]]
    expected = 1 - np.log(3 * np.e + 7)
    np.testing.assert_allclose(scores.logprobs, np.full((1, 3), expected), rtol=1e-6)


def test_token_logprobs_certain_and_huge_logits_stay_exact(monkeypatch):
    monkeypatch.setattr(logprobs, "VOCABULARY", 16)
    head = np.eye(40, 4, dtype=np.float32)
    hidden = np.asarray([[[0, 0, 3e4, 0]], [[0, 0, -3e4, 0]]], np.float32)
    source, target = np.zeros((2, 1), np.int32), np.asarray([[2], [5]], np.int32)
    scores = token_logprobs(hidden, head, source, target, 1.0)
    np.testing.assert_allclose(scores.logprobs, [[0.0], [-np.log(39)]], rtol=1e-6)
    np.testing.assert_allclose(scores.entropy, [[0.0], [np.log(39)]], rtol=1e-6)


def test_token_logprobs_not_a_number_is_not_hidden():
    hidden, head, source, target, weights = random_terms(0, 1, 4, 4, 8, 30)
    head[17] = np.nan
    scores, (d_hidden, _) = scores_and_gradients(hidden, head, source, target, weights)
    assert np.isnan(scores.logprobs).all()
    assert np.isnan(np.asarray(d_hidden)[0, source[0]]).all()


def test_token_logprobs_entropy_has_no_gradient():
    hidden, head, source, target, _ = random_terms(1, 1, 4, 4, 8, 30)
    grads = jax.grad(lambda *x: token_logprobs(*x, source, target, 1.0).entropy.sum(), argnums=(0, 1))(hidden, head)
    assert all(np.all(np.asarray(grad) == 0) for grad in grads)


def temporary_bytes(length, vocabulary, width, with_gradient):
    shapes = [((1, length, width), np.float32), ((vocabulary, width), np.float32), *[((1, length), np.int32)] * 2]

    def loss(hidden, head, source, target):
        return token_logprobs(hidden, head, source, target, TEMPERATURE).logprobs.sum()

    function = jax.grad(loss, argnums=(0, 1)) if with_gradient else loss
    compiled = jax.jit(function).lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize("with_gradient", [False, True])
def test_token_logprobs_memory_does_not_grow_with_length_times_vocabulary(with_gradient):
    length, vocabulary, width = 8192, 151_936, 64
    chunk = 4 * logprobs.TOKENS * logprobs.VOCABULARY
    inputs = 4 * width * (length + vocabulary)
    full = temporary_bytes(length, vocabulary, width, with_gradient)
    half = temporary_bytes(length, vocabulary // 2, width, with_gradient)
    assert full < 5 * chunk + inputs  # all logits would be 300 chunks
    head_gradient = 4 * width * (vocabulary // 2) if with_gradient else 0
    assert full < half + head_gradient + chunk / 4  # chunks are as even as can be, not equal


ON_A_MESH = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from actionopd_jax.models import logprobs

    logprobs.TOKENS, logprobs.VOCABULARY = 16, 100
    rng = np.random.default_rng(0)
    hidden, head = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((4, 32, 16), (1024, 16)))
    source, target = (jnp.asarray(rng.integers(0, high, (4, 24)), jnp.int32) for high in (32, 1024))
    hidden *= 0.3  # logits of 30 would lose digits in their exponentials, on any device
    best = jnp.einsum("bld,vd->blv", jnp.take_along_axis(hidden, source[..., None], 1), head).argmax(-1)
    target = jnp.where(source % 2 == 0, best, target).astype(jnp.int32)
    weights = jnp.asarray(rng.normal(size=(4, 24)), jnp.float32)

    @jax.jit
    def everything(hidden, head, source, target):
        def loss(hidden, head):
            scores = logprobs.token_logprobs(hidden, head, source, target, 0.7)
            return (scores.logprobs * weights).sum(), scores

        (_, scores), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)
        return *scores, *grads

    def check(actual):
        for a, e in zip(actual, expected):
            a, e = (np.asarray(x, np.float64) for x in (a, e))
            assert np.abs(a - e).max() < 2e-6 * np.abs(e).max(), np.abs(a - e).max()

    expected = everything(hidden, head, source, target)
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "tensor", "context"), axis_types=(AxisType.Auto,) * 3)
    specs = P("fsdp", "context"), P("tensor", "fsdp"), P("fsdp"), P("fsdp")
    shardings = tuple(NamedSharding(mesh, spec) for spec in specs)
    inputs = jax.device_put((hidden, head, source, target), shardings)
    check(everything(*inputs))  # partitioned by XLA
    with jax.set_mesh(mesh):
        check(everything(*inputs))  # per shard
        text = everything.lower(*inputs).as_text()
        assert "shard_map" in text or "manual_computation" in text, text[:2000]
    print("equal")
"""


def test_token_logprobs_on_a_mesh_equals_one_device():
    # A busy machine may starve one of the virtual devices for a while.
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=600"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-c", textwrap.dedent(ON_A_MESH)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("equal\n"), done.stderr[-3000:]
