"""Attention whose whole mask is one integer per key: query i sees key j exactly when `j <= i < end[j]`.

Plain causal rows are the case `end[j] = length of the row`; prefix trees use the end of each token's
subtree in preorder. Two implementations of one function: `dense` (the reference) and `blockwise`
(XLA, memory linear in length, blocks that nobody sees are skipped, forward and backward).
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

Implementation = Literal["dense", "blockwise"]
_NEVER = -1e30  # finite: a row without any visible key in a block must not produce NaN


def attend(
    q: Float[Array, "B T H C"],
    k: Float[Array, "B T K C"],
    v: Float[Array, "B T K C"],
    end: Int32[Array, "B T"],
    implementation: Implementation = "blockwise",
    block: int = 64,
) -> Float[Array, "B T H C"]:
    """Grouped-query attention, scores divided by sqrt(C), over the keys that `end` makes visible.

    Args:
        q: queries; H is a multiple of the number of key heads K.
        end: exclusive end of each key's visibility. A query that sees nothing gets zeros.
        implementation: both give the same values up to rounding.
        block: length of query and key blocks of `blockwise`; shortened to T where T is shorter. Short blocks skip more
            and keep their scores in the cache of a CPU core. Other lengths are padded to a multiple.
    """
    batch, length, heads, width = q.shape
    kv_heads = k.shape[2]
    if implementation == "dense":
        return _dense(q, k, v, end)
    block = min(block, length)
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, width)
    padding = -length % block
    if padding:  # padded keys end at 0: nobody sees them
        grouped, k, v, end = (jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)) for x in (grouped, k, v, end))
    # Sequential over the batch: a vectorised branch would compute both of its sides.
    out = jax.lax.map(lambda args: _blockwise(*args, block), (grouped, k, v, end))
    return out[:, :length].reshape(q.shape)


def visible(end: Int32[Array, "B T"]) -> Bool[Array, "B T T"]:
    """The dense mask `[query, key]`."""
    index = jnp.arange(end.shape[1])
    return (index[None, :] <= index[:, None]) & (index[None, :, None] < end[:, None, :])


def _dense(q: Array, k: Array, v: Array, end: Array) -> Array:
    batch, length, heads, width = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, length, kv_heads, heads // kv_heads, width)
    scores = jnp.einsum("bqkgc,btkc->bkgqt", q, k, preferred_element_type=jnp.float32) * width**-0.5
    mask = visible(end)[:, None, None]
    peak = jax.lax.stop_gradient(jnp.max(jnp.where(mask, scores, _NEVER), axis=-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, scores, _NEVER) - peak), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total > 0, total, 1.0)).astype(v.dtype)
    return jnp.einsum("bkgqt,btkc->bqkgc", weights, v).reshape(batch, length, heads, width)


class _Plan(NamedTuple):
    """For each query block its live key blocks, and how many they are; what follows them is not read."""

    keys: Int32[Array, "N N"]
    num_keys: Int32[Array, " N"]


def _plan(end: Int32[Array, " T"], block: int) -> _Plan:
    starts = jnp.arange(end.shape[0] // block) * block
    last_seen = end.reshape(-1, block).max(axis=1)
    live = (starts[None, :] <= starts[:, None]) & (last_seen[None, :] > starts[:, None])  # [query block, key block]
    return _Plan(jnp.argsort(~live, axis=1, stable=True).astype(jnp.int32), live.sum(axis=1).astype(jnp.int32))


def _block_mask(i: Array, j: Array, end_j: Int32[Array, " S"], block: int) -> Bool[Array, "S S"]:
    queries = i * block + jnp.arange(block)[:, None]
    keys = j * block + jnp.arange(block)[None, :]
    return (keys <= queries) & (queries < end_j[None, :])


def _split(x: Array, block: int) -> Array:
    """`[T, K, ..., C]` to `[N, K, ..., block, C]`: heads lead, so that each block is a batch of matrices."""
    parts = x.reshape(x.shape[0] // block, block, *x.shape[1:])
    return jnp.moveaxis(parts, 1, -2)


def _merge(x: Array) -> Array:
    parts = jnp.moveaxis(x, -2, 1)
    return parts.reshape(-1, *parts.shape[2:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _blockwise(q: Array, k: Array, v: Array, end: Array, block: int) -> Array:
    return _blockwise_forward(q, k, v, end, block)[0]


def _blockwise_forward(q: Array, k: Array, v: Array, end: Array, block: int) -> tuple[Array, tuple[Array, ...]]:
    """Online softmax over the live key blocks. q `[T,K,G,C]`; k, v `[T,K,C]`; end `[T]`."""
    scale = q.shape[-1] ** -0.5
    plan = _plan(end, block)
    queries, keys, values, ends = _split(q, block), _split(k, block), _split(v, block), end.reshape(-1, block)

    def one_query_block(i: Array) -> tuple[Array, Array]:
        q_i = queries[i]

        def one_key_block(t: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            acc, peak, total = carry
            j = plan.keys[i, t]
            scores = jnp.einsum("kgqc,ktc->kgqt", q_i, keys[j], preferred_element_type=jnp.float32) * scale
            mask = _block_mask(i, j, ends[j], block)
            scores = jnp.where(mask, scores, _NEVER)
            # Never below a floor far above _NEVER, so that what is masked is exactly 0 in a block without any key.
            new_peak = jnp.maximum(peak, scores.max(axis=-1))
            weights = jnp.exp(scores - jnp.maximum(new_peak, _NEVER / 2)[..., None])
            fade = jnp.exp(peak - new_peak)
            update = jnp.einsum("kgqt,ktc->kgqc", weights.astype(v.dtype), values[j], preferred_element_type=jnp.float32)
            return acc * fade[..., None] + update, new_peak, total * fade + weights.sum(axis=-1)

        zeros = jnp.zeros(q_i.shape[:-1], jnp.float32)
        start = (jnp.zeros(q_i.shape, jnp.float32), zeros + _NEVER, zeros)
        acc, peak, total = jax.lax.fori_loop(0, plan.num_keys[i], one_key_block, start)
        safe = jnp.where(total > 0, total, 1.0)
        return (acc / safe[..., None]).astype(q.dtype), jnp.where(total > 0, peak + jnp.log(safe), 0.0)

    out, log_total = jax.lax.map(one_query_block, jnp.arange(queries.shape[0]))
    return _merge(out), (q, k, v, end, _merge(out), log_total)


def _blockwise_backward(block: int, saved: tuple[Array, ...], grad: Array) -> tuple[Array, Array, Array, None]:
    """One pass over the live block pairs: query gradients leave block by block, key and value gradients add up."""
    q, k, v, end, out, log_total = saved
    scale = q.shape[-1] ** -0.5
    plan = _plan(end, block)
    queries, keys, values, ends = _split(q, block), _split(k, block), _split(v, block), end.reshape(-1, block)
    grads = _split(grad, block)
    delta = jnp.sum(_split(out, block).astype(jnp.float32) * grads.astype(jnp.float32), axis=-1)  # [N,K,G,S]

    def one_query_block(sums: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
        q_i, grad_i = queries[i], grads[i]

        def one_key_block(t: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_q, d_k, d_v = carry
            j = plan.keys[i, t]
            scores = jnp.einsum("kgqc,ktc->kgqt", q_i, keys[j], preferred_element_type=jnp.float32) * scale
            mask = _block_mask(i, j, ends[j], block)
            weights = jnp.exp(jnp.where(mask, scores - log_total[i][..., None], _NEVER))
            d_weights = jnp.einsum("kgqc,ktc->kgqt", grad_i, values[j], preferred_element_type=jnp.float32)
            d_scores = (weights * (d_weights - delta[i][..., None]) * scale).astype(q.dtype)
            weights = weights.astype(v.dtype)
            d_q += jnp.einsum("kgqt,ktc->kgqc", d_scores, keys[j], preferred_element_type=jnp.float32)
            d_k = d_k.at[j].add(jnp.einsum("kgqt,kgqc->ktc", d_scores, q_i, preferred_element_type=jnp.float32))
            d_v = d_v.at[j].add(jnp.einsum("kgqt,kgqc->ktc", weights, grad_i, preferred_element_type=jnp.float32))
            return d_q, d_k, d_v

        start = (jnp.zeros(q_i.shape, jnp.float32), *sums)
        d_q, *sums_after = jax.lax.fori_loop(0, plan.num_keys[i], one_key_block, start)
        return (sums_after[0], sums_after[1]), d_q.astype(q.dtype)

    zeros = jnp.zeros(keys.shape, jnp.float32)
    (d_k, d_v), d_q = jax.lax.scan(one_query_block, (zeros, zeros), jnp.arange(queries.shape[0]))
    return _merge(d_q), _merge(d_k).astype(k.dtype), _merge(d_v).astype(v.dtype), None


_blockwise.defvjp(_blockwise_forward, _blockwise_backward)
