"""Bodies of the Pallas attention kernels, each for one pair of a query block and a key block.

A grid walks the pairs; scratch in VMEM carries sums from pair to pair. References end in `_ref`; tokens
are blocks `[1, 1, block, head_dim]`, numbers per token are rows `[1, 1, block]` (keys) or `[1, 1, 1, block]`
(queries). `first_ref[0]` is the place of the first query among the keys, `last_ref[row, block]` the largest
`end` of a key block.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float32, Int32

LANES = 128
NEVER = -1e30  # finite: a block without any visible key must not produce NaN
_A_BT = (((1,), (1,)), ((), ()))
_A_B = (((1,), (0,)), ((), ()))


def forward_kernel(
    first_ref, last_ref, q_ref, k_ref, v_ref, end_ref, out_ref, log_total_ref, acc_ref, peak_ref, total_ref, *, exact: bool
) -> None:
    """Online softmax of one query block over its key blocks; grid (row, head, query block, key block)."""
    row, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    shape = q_ref.shape[2], k_ref.shape[2]
    first_query, first_key = first_ref[0] + i * shape[0], j * shape[1]

    @pl.when(j == 0)
    def _() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)
        peak_ref[...] = jnp.full_like(peak_ref, NEVER)
        total_ref[...] = jnp.zeros_like(total_ref)

    @pl.when(_is_live(first_query, first_key, last_ref[row, j], shape[0]))
    def _() -> None:
        scores = _dot(q_ref[0, 0], k_ref[0, 0], _A_BT, exact) * q_ref.shape[3] ** -0.5
        scores = jnp.where(_visible(first_query, first_key, end_ref[0], shape, 0), scores, NEVER)
        peak = peak_ref[:, :1]
        new_peak = jnp.maximum(peak, scores.max(axis=1, keepdims=True))
        # Never below a floor far above NEVER, so that what is masked is exactly 0 where nothing has been seen yet.
        weights = jnp.exp(scores - jnp.maximum(new_peak, NEVER / 2))
        fade = jnp.exp(peak - new_peak)
        total_ref[...] = total_ref[...] * fade + weights.sum(axis=1, keepdims=True)
        peak_ref[...] = jnp.broadcast_to(new_peak, peak_ref.shape)
        acc_ref[...] = acc_ref[...] * fade + _dot(weights.astype(v_ref.dtype), v_ref[0, 0], _A_B, exact)

    @pl.when(j == pl.num_programs(3) - 1)
    def _() -> None:
        total = total_ref[...]
        sees_something = total > 0
        safe = jnp.where(sees_something, total, 1.0)
        out_ref[0, 0] = (acc_ref[...] / safe[:, :1]).astype(out_ref.dtype)
        log_total = jnp.where(sees_something, peak_ref[...] + jnp.log(safe), 0.0)
        log_total_ref[0, 0] = log_total.T[:1]


def query_gradient_kernel(
    first_ref,
    last_ref,
    q_ref,
    k_ref,
    v_ref,
    end_ref,
    grad_ref,
    log_total_ref,
    delta_ref,
    d_q_ref,
    acc_ref,
    log_total_column_ref,
    delta_column_ref,
    *,
    exact: bool,
) -> None:
    """Gradient of one query block from its key blocks; grid (row, head, query block, key block)."""
    row, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    shape = q_ref.shape[2], k_ref.shape[2]
    first_query, first_key = first_ref[0] + i * shape[0], j * shape[1]

    @pl.when(j == 0)
    def _() -> None:
        acc_ref[...] = jnp.zeros_like(acc_ref)
        log_total_column_ref[...] = _column(log_total_ref[0, 0])
        delta_column_ref[...] = _column(delta_ref[0, 0])

    @pl.when(_is_live(first_query, first_key, last_ref[row, j], shape[0]))
    def _() -> None:
        scale = q_ref.shape[3] ** -0.5
        scores = _dot(q_ref[0, 0], k_ref[0, 0], _A_BT, exact) * scale
        visible = _visible(first_query, first_key, end_ref[0], shape, 0)
        weights = jnp.exp(jnp.where(visible, scores - log_total_column_ref[:, :1], NEVER))
        d_weights = _dot(grad_ref[0, 0], v_ref[0, 0], _A_BT, exact)
        d_scores = weights * (d_weights - delta_column_ref[:, :1]) * scale
        acc_ref[...] += _dot(d_scores.astype(k_ref.dtype), k_ref[0, 0], _A_B, exact)

    @pl.when(j == pl.num_programs(3) - 1)
    def _() -> None:
        d_q_ref[0, 0] = acc_ref[...].astype(d_q_ref.dtype)


def key_gradient_kernel(
    first_ref,
    last_ref,
    q_ref,
    k_ref,
    v_ref,
    end_ref,
    grad_ref,
    log_total_ref,
    delta_ref,
    d_k_ref,
    d_v_ref,
    d_k_acc_ref,
    d_v_acc_ref,
    end_column_ref,
    *,
    exact: bool,
) -> None:
    """Gradients of one key block from all queries; grid (row, key head, key block, head of the group, query block).

    Scores are transposed, `[keys, queries]`: the queries' numbers are rows as they come, and only the keys'
    `end` has to be turned, once.
    """
    row, j, h, i = pl.program_id(0), pl.program_id(2), pl.program_id(3), pl.program_id(4)
    shape = k_ref.shape[2], q_ref.shape[2]
    first_query, first_key = first_ref[0] + i * shape[1], j * shape[0]

    @pl.when((h == 0) & (i == 0))
    def _() -> None:
        d_k_acc_ref[...] = jnp.zeros_like(d_k_acc_ref)
        d_v_acc_ref[...] = jnp.zeros_like(d_v_acc_ref)
        end_column_ref[...] = _column(end_ref[0])

    @pl.when(_is_live(first_query, first_key, last_ref[row, j], shape[1]))
    def _() -> None:
        scale = q_ref.shape[3] ** -0.5
        scores = _dot(k_ref[0, 0], q_ref[0, 0], _A_BT, exact) * scale
        visible = _visible(first_query, first_key, end_column_ref[:, :1], shape, 1)
        weights = jnp.exp(jnp.where(visible, scores - log_total_ref[0, 0], NEVER))
        d_v_acc_ref[...] += _dot(weights.astype(grad_ref.dtype), grad_ref[0, 0], _A_B, exact)
        d_weights = _dot(v_ref[0, 0], grad_ref[0, 0], _A_BT, exact)
        d_scores = weights * (d_weights - delta_ref[0, 0]) * scale
        d_k_acc_ref[...] += _dot(d_scores.astype(q_ref.dtype), q_ref[0, 0], _A_B, exact)

    @pl.when((h == pl.num_programs(3) - 1) & (i == pl.num_programs(4) - 1))
    def _() -> None:
        d_k_ref[0, 0] = d_k_acc_ref[...].astype(d_k_ref.dtype)
        d_v_ref[0, 0] = d_v_acc_ref[...].astype(d_v_ref.dtype)


def _dot(a: Array, b: Array, dimensions: Any, exact: bool) -> Float32[Array, "M N"]:
    """Product of two blocks, added in float32; `exact` keeps float32 factors from being rounded to bfloat16."""
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _is_live(first_query: Array, first_key: Array, last_seen: Array, query_block: int) -> Bool[Array, ""]:
    return (first_key < first_query + query_block) & (last_seen > first_query)


def _visible(
    first_query: Array, first_key: Array, end: Int32[Array, "..."], shape: tuple[int, int], query_axis: int
) -> Bool[Array, "..."]:
    """The mask of a block; `end` is a row of keys (query axis 0) or a column of keys (query axis 1)."""
    queries = first_query + jax.lax.broadcasted_iota(jnp.int32, shape, query_axis)
    keys = first_key + jax.lax.broadcasted_iota(jnp.int32, shape, 1 - query_axis)
    return (keys <= queries) & (queries < end)


def _column(row: Array) -> Array:
    """A row of lanes `[1, S]` as a column `[S, 128]`, repeated in every lane."""
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T
