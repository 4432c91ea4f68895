"""Blockwise attention in XLA: online softmax over live key blocks, one row of the batch after another.

Queries may be a part of the row (`first_query` is the place of the first one among the keys). Blocks are
short because short blocks skip more and keep their scores in the cache of a CPU core; on an accelerator
without a kernel of its own, longer ones (256 to 512) keep its matrix units busier.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

BLOCK = 64
_NEVER = -1e30  # finite: a block without any visible key must not produce NaN


def forward(
    q: Float[Array, "B S H C"],
    k: Float[Array, "B T K C"],
    v: Float[Array, "B T K C"],
    end: Int32[Array, "B T"],
    first_query: Int32[Array, ""],
    *,
    block: int = BLOCK,
) -> tuple[Float[Array, "B S H C"], Float32[Array, "B H S"]]:
    """Outputs, and the logarithm of each query's sum of exponentiated scores (0 where it sees nothing)."""
    # Sequential over the batch: a vectorised branch would compute both of its sides.
    return jax.lax.map(lambda row: _forward_row(row[0], row[1], row[2], row[3], first_query, block), (q, k, v, end))


def backward(
    q: Float[Array, "B S H C"],
    k: Float[Array, "B T K C"],
    v: Float[Array, "B T K C"],
    end: Int32[Array, "B T"],
    first_query: Int32[Array, ""],
    log_total: Float32[Array, "B H S"],
    delta: Float32[Array, "B H S"],
    grad: Float[Array, "B S H C"],
    *,
    block: int = BLOCK,
) -> tuple[Float[Array, "B S H C"], Float[Array, "B T K C"], Float[Array, "B T K C"]]:
    """Gradients of q, k, v.

    Args:
        log_total: from `forward`.
        delta: sum over C of output times `grad`.
        grad: of the output.
    """
    rows = _Row(q, k, v, end, log_total, delta, grad)
    return jax.lax.map(lambda row: _backward_row(row, first_query, block), rows)


class _Blocks(NamedTuple):
    """A row in blocks, `N` of queries and `M` of keys; heads lead, so that each block is a batch of matrices."""

    queries: Float[Array, "N K G S C"]
    keys: Float[Array, "M K S C"]
    values: Float[Array, "M K S C"]
    ends: Int32[Array, "M S"]
    first_query: Int32[Array, ""]
    live: Int32[Array, "N M"]  # for each query block its live key blocks; what follows them is not read
    num_live: Int32[Array, " N"]

    def mask(self, i: Array, j: Array) -> Bool[Array, "S S"]:
        query_block, key_block = self.queries.shape[-2], self.keys.shape[-2]
        queries = self.first_query + i * query_block + jnp.arange(query_block)[:, None]
        keys = j * key_block + jnp.arange(key_block)[None, :]
        return (keys <= queries) & (queries < self.ends[j][None, :])


def _blocks(q: Array, k: Array, v: Array, end: Array, first_query: Array, block: int) -> _Blocks:
    query_block, key_block = min(block, q.shape[0]), min(block, k.shape[0])
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
    ends = _pad(end, key_block).reshape(-1, key_block)
    queries = _split(grouped, query_block)
    first = first_query + jnp.arange(queries.shape[0]) * query_block
    starts = jnp.arange(ends.shape[0]) * key_block
    live = (starts[None, :] < first[:, None] + query_block) & (ends.max(axis=1)[None, :] > first[:, None])
    order = jnp.argsort(~live, axis=1, stable=True).astype(jnp.int32)
    num_live = live.sum(axis=1).astype(jnp.int32)
    return _Blocks(queries, _split(k, key_block), _split(v, key_block), ends, first_query, order, num_live)


def _pad(x: Array, block: int, value: float = 0) -> Array:
    """Zeros behind the first dimension up to whole blocks: keys with end 0 are seen by nobody."""
    missing = -x.shape[0] % block
    return jnp.pad(x, ((0, missing), *((0, 0),) * (x.ndim - 1)), constant_values=value) if missing else x


def _split(x: Array, block: int) -> Array:
    """`[T, K, ..., C]` to `[N, K, ..., block, C]`."""
    x = _pad(x, block)
    parts = x.reshape(x.shape[0] // block, block, *x.shape[1:])
    return jnp.moveaxis(parts, 1, -2)


def _merge(x: Array, length: int) -> Array:
    parts = jnp.moveaxis(x, -2, 1)
    return parts.reshape(-1, *parts.shape[2:])[:length]


def _split_totals(x: Float32[Array, "H S"], like: _Blocks, padding: float) -> Float32[Array, "N K G S"]:
    num_blocks, kv_heads, groups, block, _ = like.queries.shape
    rows = _pad(x.T, block, padding).reshape(num_blocks, block, kv_heads, groups)
    return jnp.moveaxis(rows, 1, -1)


def _forward_row(q: Array, k: Array, v: Array, end: Array, first_query: Array, block: int) -> tuple[Array, Array]:
    scale = q.shape[-1] ** -0.5
    blocks = _blocks(q, k, v, end, first_query, block)

    def one_query_block(i: Array) -> tuple[Array, Array]:
        q_i = blocks.queries[i]

        def one_key_block(t: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            acc, peak, total = carry
            j = blocks.live[i, t]
            scores = jnp.einsum("kgqc,ktc->kgqt", q_i, blocks.keys[j], preferred_element_type=jnp.float32) * scale
            scores = jnp.where(blocks.mask(i, j), scores, _NEVER)
            # Never below a floor far above _NEVER, so that what is masked is exactly 0 in a block without any key.
            new_peak = jnp.maximum(peak, scores.max(axis=-1))
            weights = jnp.exp(scores - jnp.maximum(new_peak, _NEVER / 2)[..., None])
            fade = jnp.exp(peak - new_peak)
            values = blocks.values[j]
            update = jnp.einsum("kgqt,ktc->kgqc", weights.astype(v.dtype), values, preferred_element_type=jnp.float32)
            return acc * fade[..., None] + update, new_peak, total * fade + weights.sum(axis=-1)

        zeros = jnp.zeros(q_i.shape[:-1], jnp.float32)
        start = (jnp.zeros(q_i.shape, jnp.float32), zeros + _NEVER, zeros)
        acc, peak, total = jax.lax.fori_loop(0, blocks.num_live[i], one_key_block, start)
        safe = jnp.where(total > 0, total, 1.0)
        return (acc / safe[..., None]).astype(q.dtype), jnp.where(total > 0, peak + jnp.log(safe), 0.0)

    out, log_total = jax.lax.map(one_query_block, jnp.arange(blocks.queries.shape[0]))
    log_total = jnp.moveaxis(log_total, 0, -2).reshape(q.shape[1], -1)[:, : q.shape[0]]
    return _merge(out, q.shape[0]).reshape(q.shape), log_total


class _Row(NamedTuple):
    """Arguments of the backward pass; one row of each, or all."""

    q: Array
    k: Array
    v: Array
    end: Array
    log_total: Array
    delta: Array
    grad: Array


def _backward_row(row: _Row, first_query: Array, block: int) -> tuple[Array, Array, Array]:
    """One pass over the live block pairs: query gradients leave block by block, key and value gradients add up."""
    q, k, v, end, log_total, delta, grad = row
    scale = q.shape[-1] ** -0.5
    blocks = _blocks(q, k, v, end, first_query, block)
    grads = _split(grad.reshape(grad.shape[0], k.shape[1], -1, grad.shape[2]), blocks.queries.shape[-2])
    # A query of the padding may see keys; an immense total makes all its weights 0.
    log_totals, deltas = _split_totals(log_total, blocks, -_NEVER), _split_totals(delta, blocks, 0.0)

    def one_query_block(sums: tuple[Array, Array], i: Array) -> tuple[tuple[Array, Array], Array]:
        q_i, grad_i = blocks.queries[i], grads[i]

        def one_key_block(t: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_q, d_k, d_v = carry
            j = blocks.live[i, t]
            k_j, v_j = blocks.keys[j], blocks.values[j]
            scores = jnp.einsum("kgqc,ktc->kgqt", q_i, k_j, preferred_element_type=jnp.float32) * scale
            weights = jnp.exp(jnp.where(blocks.mask(i, j), scores - log_totals[i][..., None], _NEVER))
            d_weights = jnp.einsum("kgqc,ktc->kgqt", grad_i, v_j, preferred_element_type=jnp.float32)
            d_scores = (weights * (d_weights - deltas[i][..., None]) * scale).astype(q.dtype)
            weights = weights.astype(v.dtype)
            d_q += jnp.einsum("kgqt,ktc->kgqc", d_scores, k_j, preferred_element_type=jnp.float32)
            d_k = d_k.at[j].add(jnp.einsum("kgqt,kgqc->ktc", d_scores, q_i, preferred_element_type=jnp.float32))
            d_v = d_v.at[j].add(jnp.einsum("kgqt,kgqc->ktc", weights, grad_i, preferred_element_type=jnp.float32))
            return d_q, d_k, d_v

        start = (jnp.zeros(q_i.shape, jnp.float32), *sums)
        d_q, *sums_after = jax.lax.fori_loop(0, blocks.num_live[i], one_key_block, start)
        return (sums_after[0], sums_after[1]), d_q.astype(q.dtype)

    zeros = jnp.zeros(blocks.keys.shape, jnp.float32)
    (d_k, d_v), d_q = jax.lax.scan(one_query_block, (zeros, zeros), jnp.arange(blocks.queries.shape[0]))
    d_q = _merge(d_q, q.shape[0]).reshape(q.shape)
    return d_q, _merge(d_k, k.shape[0]).astype(k.dtype), _merge(d_v, k.shape[0]).astype(v.dtype)
