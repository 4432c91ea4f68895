"""Batched generation with key/value caches: one prefill per prompt serves its N candidates.

A prompt is `shared prefix + suffix`. The prefix (system text and tools, the same for many states) is
computed once per policy version and kept without a batch dimension; the suffix is prefilled once per
prompt; only what is generated is kept per candidate. Every row is computed by the same program on the
same shapes whatever its neighbours are, so a response never depends on the batch it was drawn in.

On a mesh prompts are split over `replica` and `fsdp`, heads over `tensor`; weights are gathered along
`fsdp` once per batch, in the computation dtype, not once per token.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from actionopd_jax.models import attention, sharding
from actionopd_jax.models.decoder import Decoder, LayerParams, finish_layer, project_qkv, rotary
from actionopd_jax.records import Sampling


class KeyValues(NamedTuple):
    """Keys and values of all layers: `[layers, ..., K, C]`."""

    keys: Array
    values: Array


class Generated(NamedTuple):
    """Sampled ids, their log-probabilities, and how many are real."""

    ids: Int32[Array, "B N R"]
    logprobs: Float32[Array, "B N R"]
    lengths: Int32[Array, "B N"]


@functools.partial(jax.jit, static_argnums=0)
def prefill_prefix(graphdef: nnx.GraphDef, params: nnx.State, tokens: Int32[Array, " P"]) -> KeyValues:
    """Caches of a prefix, `[layers, P, K, C]`."""
    model = nnx.merge(graphdef, params)
    rotation = rotary(jnp.arange(tokens.shape[0]), model.config)
    end = jnp.full((1, tokens.shape[0]), tokens.shape[0], jnp.int32)

    def layer(x: Array, layer_params: LayerParams) -> tuple[Array, KeyValues]:
        q, k, v = project_qkv(x, layer_params, rotation, model.config)
        mixed = attention.attend(q[None], k[None], v[None], end, model.attention_implementation)[0]
        return finish_layer(x, mixed, layer_params, model.config), KeyValues(k, v)

    return jax.lax.scan(layer, model.embed(tokens), sharding.gathered_layer(model.layer_params(), model.dtype))[1]


@functools.partial(jax.jit, static_argnames=("graphdef", "sampling", "num_candidates", "num_valid_ids", "end_id"))
def generate(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    prefix: KeyValues,
    suffix: Int32[Array, "B S"],
    suffix_lengths: Int32[Array, " B"],
    is_real: Bool[Array, " B"],
    seeds: UInt32[Array, "B 2"],
    *,
    sampling: Sampling,
    num_candidates: int,
    num_valid_ids: int,
    end_id: int,
) -> Generated:
    """N responses to each prompt, until the end token or `sampling.max_tokens`.

    Args:
        suffix: prompt ids after the prefix, padded on the right; at least one real id per row.
        is_real: False for rows that only fill the batch.
        seeds: two words per prompt; candidate and position are folded in.
        num_valid_ids: embedding rows from here on are never drawn.
    """
    model: Decoder = nnx.merge(graphdef, params)
    # Matrices are cast once, not at every token; the norms' scales keep their dtype.
    layers = {name: x if name.endswith("_norm") else x.astype(model.dtype) for name, x in model.layer_params().items()}
    layers = sharding.gathered_layer(layers, model.dtype)
    head = model.head_weight()
    last, suffix_kv = _prefill(model, layers, prefix, suffix, suffix_lengths, is_real)
    batch = suffix.shape[0]
    shape = (batch, num_candidates, sampling.max_tokens)
    first_logits = jnp.broadcast_to(_logits(last, head)[:, None], (batch, num_candidates, head.shape[0]))
    keys = jax.vmap(lambda seed: jax.random.wrap_key_data(seed, impl="threefry2x32"))(seeds)
    keys = jax.vmap(lambda key: jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(num_candidates)))(keys)
    config = model.config
    cache_shape = (config.num_hidden_layers, *shape, config.num_key_value_heads, config.head_dim)
    empty = sharding.constrain(jnp.zeros(cache_shape, model.dtype), None, "batch", None, None, "kv_heads", None)
    cache = KeyValues(empty, empty)
    done = jnp.broadcast_to(~is_real[:, None], shape[:2])
    start = (
        jnp.int32(0), first_logits, cache, done,
        Generated(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32), jnp.zeros(shape[:2], jnp.int32)),
    )  # fmt: skip
    offset = prefix.keys.shape[1]

    def unfinished(carry: tuple) -> Array:
        return (carry[0] < sampling.max_tokens) & ~jnp.all(carry[3])

    def step(carry: tuple) -> tuple:
        t, logits, cache, done, out = carry
        step_keys = jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, t)))(keys)
        ids, logprobs = draw(logits, step_keys, sampling, num_valid_ids)
        out = Generated(
            out.ids.at[:, :, t].set(jnp.where(done, 0, ids)),
            out.logprobs.at[:, :, t].set(jnp.where(done, 0.0, logprobs)),
            out.lengths + ~done,
        )
        done = done | (ids == end_id)
        positions = jnp.broadcast_to((offset + suffix_lengths + t)[:, None], shape[:2])
        x, new = _decode(model, layers, prefix, suffix_kv, suffix_lengths, cache, ids, positions, t)
        cache = KeyValues(cache.keys.at[:, :, :, t].set(new.keys), cache.values.at[:, :, :, t].set(new.values))
        return t + 1, _logits(x, head), cache, done, out

    return jax.lax.while_loop(unfinished, step, start)[4]


def draw(
    logits: Float32[Array, "B N V"], keys: Array, sampling: Sampling, num_valid_ids: int
) -> tuple[Int32[Array, "B N"], Float32[Array, "B N"]]:
    """One id per row and its log softmax(logits / T) over the full vocabulary.

    The draw itself uses the valid ids only, the `top_k` most likely of them, and of those (renormalised)
    the smallest set that reaches `top_p`. Temperature 0 takes the most likely valid id; its
    log-probability is that of T = 1.
    """
    temperature = sampling.temperature or 1.0
    scaled = logits / temperature
    allowed = jnp.where(jnp.arange(logits.shape[-1]) < num_valid_ids, scaled, -jnp.inf)
    if sampling.temperature == 0:
        ids = jnp.argmax(allowed, axis=-1)
    else:
        count = min(sampling.top_k or num_valid_ids, num_valid_ids)
        if count == num_valid_ids and sampling.top_p >= 1:
            ids = _draw_uncut(allowed, keys)
        else:
            top, top_ids = jax.lax.top_k(allowed, count)  # descending
            if sampling.top_p < 1:  # at 1, rounding in the running sum would cut the tail
                probabilities = jax.nn.softmax(top, axis=-1)
                before = jnp.cumsum(probabilities, axis=-1) - probabilities
                top = jnp.where((before < sampling.top_p) | (jnp.arange(count) == 0), top, -jnp.inf)
            choice = jnp.argmax(top + _gumbel(keys, count), axis=-1)
            ids = jnp.take_along_axis(top_ids, choice[..., None], axis=-1)[..., 0]
    logprobs = jnp.take_along_axis(scaled, ids[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(scaled, axis=-1)
    return ids.astype(jnp.int32), logprobs


def _draw_uncut(logits: Float32[Array, "B N V"], keys: Array) -> Int32[Array, "B N"]:
    """One id per row from softmax(logits): a block of ids by its mass, then an id of the block.

    Exact, without sorting, and with two times the square root of V random numbers a row instead of V.
    """
    width = math.isqrt(logits.shape[-1] - 1) + 1
    blocks = -(-logits.shape[-1] // width)
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, blocks * width - logits.shape[-1])]
    split = jnp.pad(logits, padding, constant_values=-jnp.inf).reshape(*logits.shape[:-1], blocks, width)
    first, second = jnp.moveaxis(jax.vmap(jax.vmap(jax.random.split))(keys), -1, 0)
    block = jnp.argmax(jax.nn.logsumexp(split, axis=-1) + _gumbel(first, blocks), axis=-1)
    inside = jnp.take_along_axis(split, block[..., None, None], axis=-2)[..., 0, :]
    return block * width + jnp.argmax(inside + _gumbel(second, width), axis=-1)


def _gumbel(keys: Array, count: int) -> Float32[Array, "B N count"]:
    return jax.vmap(jax.vmap(lambda key: jax.random.gumbel(key, (count,))))(keys)


def _logits(x: Float[Array, "... D"], head: Float[Array, "V D"]) -> Float32[Array, "... V"]:
    return jnp.einsum("...d,vd->...v", x, head, preferred_element_type=jnp.float32)


def _prefill(
    model: Decoder,
    layers: LayerParams,
    prefix: KeyValues,
    suffix: Int32[Array, "B S"],
    lengths: Int32[Array, " B"],
    is_real: Bool[Array, " B"],
) -> tuple[Float[Array, "B D"], KeyValues]:
    """Hidden states of the last tokens of the suffixes, and the suffixes' caches `[layers, B, S, K, C]`."""
    if sharding.current_mesh() is not None:
        hidden, cache = _prefill_rows(model, layers, prefix, suffix)
        return jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0], cache

    def one(tokens: Array, length: Array) -> tuple[Array, KeyValues]:
        hidden, cache = _prefill_rows(model, layers, prefix, tokens[None])
        return hidden[0, length - 1], KeyValues(cache.keys[:, 0], cache.values[:, 0])

    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, suffix[0], lengths[0]))

    # One row at a time: a row that only fills the batch costs nothing, and shapes stay those of a full batch.
    def row(inputs: tuple[Array, Array, Array]) -> tuple[Array, KeyValues]:
        tokens, length, real = inputs
        return jax.lax.cond(real, one, lambda *_: nothing, tokens, length)

    last, cache = jax.lax.map(row, (suffix, lengths, is_real))
    return last, KeyValues(jnp.moveaxis(cache.keys, 0, 1), jnp.moveaxis(cache.values, 0, 1))


def _prefill_rows(
    model: Decoder, layers: LayerParams, prefix: KeyValues, suffix: Int32[Array, "B S"]
) -> tuple[Float[Array, "B S D"], KeyValues]:
    offset = prefix.keys.shape[1]
    batch, length = suffix.shape
    rotation = rotary(jnp.broadcast_to(offset + jnp.arange(length), (batch, length)), model.config)
    end = jnp.full((batch, length), length, jnp.int32)

    def layer(x: Array, inputs: tuple[LayerParams, KeyValues]) -> tuple[Array, KeyValues]:
        params, before = inputs
        q, k, v = project_qkv(x, params, rotation, model.config)
        if offset == 0:
            mixed = attention.attend(q, k, v, end, model.attention_implementation)
        else:  # one row at a time bounds the memory of the scores
            mixed = jax.lax.map(lambda row: _prefixed_attention(row[0], row[1], row[2], before), (q, k, v))
        k, v = (sharding.constrain(x, "batch", None, "kv_heads", None) for x in (k, v))
        return finish_layer(x, mixed, params, model.config), KeyValues(k, v)

    x, cache = jax.lax.scan(layer, model.embed(suffix), (layers, prefix))
    return model.final(x), cache


def _prefixed_attention(q: Array, k: Array, v: Array, prefix: KeyValues) -> Array:
    """Causal attention of one suffix `[S, ., C]` that also sees a whole prefix `[P, K, C]`."""
    length, heads, width = q.shape
    kv_heads, offset = k.shape[1], prefix.keys.shape[0]
    keys, values = jnp.concatenate([prefix.keys, k]), jnp.concatenate([prefix.values, v])
    grouped = q.reshape(length, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("qkgc,tkc->kgqt", grouped, keys, preferred_element_type=jnp.float32) * width**-0.5
    seen = jnp.arange(offset + length)[None, :] <= offset + jnp.arange(length)[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1).astype(v.dtype)
    return jnp.einsum("kgqt,tkc->qkgc", weights, values).reshape(q.shape)


def _decode(
    model: Decoder,
    layers: LayerParams,
    prefix: KeyValues,
    suffix: KeyValues,
    suffix_lengths: Int32[Array, " B"],
    cache: KeyValues,
    ids: Int32[Array, "B N"],
    positions: Int32[Array, "B N"],
    t: Int32[Array, ""],
) -> tuple[Float[Array, "B N D"], KeyValues]:
    """One more token per candidate: its last hidden state and its own keys and values `[layers, B, N, K, C]`."""
    rotation = rotary(positions, model.config)
    batch, candidates = ids.shape
    in_suffix = jnp.arange(suffix.keys.shape[2])[None] < suffix_lengths[:, None]  # [B, S]
    in_cache = jnp.arange(cache.keys.shape[3]) < t  # [R]
    scale = model.config.head_dim**-0.5

    def layer(x: Array, inputs: tuple[LayerParams, KeyValues, KeyValues, KeyValues]) -> tuple[Array, KeyValues]:
        params, before, own, earlier = inputs
        q, k, v = project_qkv(x, params, rotation, model.config)
        grouped = q.reshape(batch, candidates, k.shape[2], -1, q.shape[-1])
        parts = [
            jnp.einsum("bnkgc,pkc->bnkgp", grouped, before.keys, preferred_element_type=jnp.float32),
            jnp.where(
                in_suffix[:, None, None, None],
                jnp.einsum("bnkgc,bskc->bnkgs", grouped, own.keys, preferred_element_type=jnp.float32),
                -jnp.inf,
            ),
            jnp.where(
                in_cache,
                jnp.einsum("bnkgc,bnrkc->bnkgr", grouped, earlier.keys, preferred_element_type=jnp.float32),
                -jnp.inf,
            ),
            jnp.einsum("bnkgc,bnkc->bnkg", grouped, k, preferred_element_type=jnp.float32)[..., None],
        ]
        sizes = [part.shape[-1] for part in parts]
        weights = jax.nn.softmax(jnp.concatenate(parts, axis=-1) * scale, axis=-1).astype(v.dtype)
        cuts = [sum(sizes[: i + 1]) for i in range(3)]
        on_prefix, on_suffix, on_cache, on_self = jnp.split(weights, cuts, axis=-1)
        mixed = (
            jnp.einsum("bnkgp,pkc->bnkgc", on_prefix, before.values)
            + jnp.einsum("bnkgs,bskc->bnkgc", on_suffix, own.values)
            + jnp.einsum("bnkgr,bnrkc->bnkgc", on_cache, earlier.values)
            + on_self * v[:, :, :, None]
        )
        return finish_layer(x, mixed.reshape(q.shape), params, model.config), KeyValues(k, v)

    x, new = jax.lax.scan(layer, model.embed(ids), (layers, prefix, suffix, cache))
    return model.final(x), new
