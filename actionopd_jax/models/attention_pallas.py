"""Flash attention for TPUs: the Pallas calls around `attention_kernels`, forward and backward.

The kernels see `[batch, heads, tokens, head_dim]`. A block pair is skipped when causality or the largest
`end` of its keys (prefetched as scalars) hides it; pairs that causality hides are not fetched either.
Per-query numbers (log totals, delta) travel as rows of lanes: a column would occupy 128 times its size.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from actionopd_jax.models.attention_kernels import LANES, NEVER, forward_kernel, key_gradient_kernel, query_gradient_kernel

BLOCK = 512  # a 512 x 512 block of float32 scores is 1 MiB; the backward kernels hold about five of the 16 MiB of VMEM


def forward(
    q: Float[Array, "B S H C"],
    k: Float[Array, "B T K C"],
    v: Float[Array, "B T K C"],
    end: Int32[Array, "B T"],
    first_query: Int32[Array, ""],
    *,
    block: int = BLOCK,
    interpret: bool = False,
) -> tuple[Float[Array, "B S H C"], Float32[Array, "B H S"]]:
    """Outputs, and the logarithm of each query's sum of exponentiated scores (0 where it sees nothing).

    Args:
        first_query: place of the first query among the keys.
        block: upper bound of block lengths, at least 128. Used is the largest multiple of 128 that divides the
            length (padded to a multiple of 128); multiples of 512 are best.
        interpret: run the kernels as plain XLA on any device.
    """
    problem = _Problem.of(q, k, block, interpret)
    q, k, v = (_heads_first(x) for x in (q, k, v))
    query, key = problem.specs_by_query()
    out, log_total = problem.call(
        forward_kernel,
        inputs=[query.tokens, key.tokens, key.tokens, key.row],
        outputs=[query.tokens, query.row],
        shapes=[problem.like_queries(q.dtype), problem.query_row()],
        scratch=[problem.query_scratch(problem.width), problem.query_scratch(LANES), problem.query_scratch(LANES)],
        num_matmuls=2,
    )(*problem.scalars(end, first_query), q, k, v, _row(end))
    return _heads_last(out, problem.num_queries), log_total[:, :, 0, : problem.num_queries]


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
    interpret: bool = False,
) -> tuple[Float[Array, "B S H C"], Float[Array, "B T K C"], Float[Array, "B T K C"]]:
    """Gradients of q, k, v.

    Args:
        log_total: from `forward`.
        delta: sum over C of output times `grad`.
        grad: of the output.
    """
    problem = _Problem.of(q, k, block, interpret)
    num_keys = k.shape[1]
    q, k, v, grad = (_heads_first(x) for x in (q, k, v, grad))
    # A query of the padding may see keys; an immense total makes all its weights 0.
    arrays = (q, k, v, _row(end), grad, _row(log_total, -NEVER), _row(delta))
    scalars = problem.scalars(end, first_query)
    query, key = problem.specs_by_query()
    (d_q,) = problem.call(
        query_gradient_kernel,
        inputs=[query.tokens, key.tokens, key.tokens, key.row, query.tokens, query.row, query.row],
        outputs=[query.tokens],
        shapes=[problem.like_queries(q.dtype)],
        scratch=[problem.query_scratch(problem.width), problem.query_scratch(LANES), problem.query_scratch(LANES)],
        num_matmuls=3,
    )(*scalars, *arrays)
    query, key = problem.specs_by_key()
    d_k, d_v = problem.call(
        key_gradient_kernel,
        inputs=[query.tokens, key.tokens, key.tokens, key.row, query.tokens, query.row, query.row],
        outputs=[key.tokens, key.tokens],
        shapes=[problem.like_keys(k.dtype), problem.like_keys(v.dtype)],
        scratch=[
            problem.key_scratch(problem.width),
            problem.key_scratch(problem.width),
            problem.key_scratch(LANES, jnp.int32),
        ],
        num_matmuls=4,
        by_key=True,
    )(*scalars, *arrays)
    return _heads_last(d_q, problem.num_queries), _heads_last(d_k, num_keys), _heads_last(d_v, num_keys)


def _heads_first(x: Array) -> Array:
    """`[B, T, H, C]` to `[B, H, T, C]`, padded to whole lanes of tokens."""
    x = jnp.swapaxes(x, 1, 2)
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % LANES), (0, 0)))


def _heads_last(x: Array, length: int) -> Array:
    return jnp.swapaxes(x[:, :, :length], 1, 2)


def _row(x: Array, padding: float = 0) -> Array:
    """`[..., T]` to `[..., 1, T]`, padded to whole lanes: keys with end 0 are seen by nobody."""
    x = x[..., None, :]
    missing = -x.shape[-1] % LANES
    return jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, missing)), constant_values=padding)


class _Specs(NamedTuple):
    """Blocks of one side of the score matrix: `[1, 1, block, C]` of tokens, a row of one number per token."""

    tokens: pl.BlockSpec
    row: pl.BlockSpec


class _Problem(NamedTuple):
    """Sizes of one call; lengths in tokens, `length` of keys and `query_length` padded to whole lanes."""

    batch: int
    heads: int
    kv_heads: int
    num_queries: int
    query_length: int
    length: int
    width: int
    query_block: int
    key_block: int
    itemsize: int
    exact: bool
    interpret: bool

    @classmethod
    def of(cls, q: Array, k: Array, block: int, interpret: bool) -> "_Problem":
        batch, num_queries, heads, width = q.shape
        query_length, length = (n + -n % LANES for n in (num_queries, k.shape[1]))
        blocks = _block_length(query_length, block), _block_length(length, block)
        kind = q.dtype.itemsize, q.dtype == jnp.float32
        return cls(batch, heads, k.shape[2], num_queries, query_length, length, width, *blocks, *kind, interpret)

    @property
    def groups(self) -> int:
        return self.heads // self.kv_heads

    def like_queries(self, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.batch, self.heads, self.query_length, self.width), dtype)

    def like_keys(self, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.batch, self.kv_heads, self.length, self.width), dtype)

    def query_row(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.batch, self.heads, 1, self.query_length), jnp.float32)

    def query_scratch(self, width: int) -> Any:
        return pltpu.VMEM((self.query_block, width), jnp.float32)

    def key_scratch(self, width: int, dtype: Any = jnp.float32) -> Any:
        return pltpu.VMEM((self.key_block, width), dtype)

    def scalars(self, end: Array, first_query: Array) -> tuple[Array, Array]:
        """What is prefetched: the place of the first query, and each key block's largest end."""
        ends = jnp.pad(end, ((0, 0), (0, self.length - end.shape[1])))
        return first_query.reshape(1), ends.reshape(self.batch, -1, self.key_block).max(axis=-1)

    def specs_by_query(self) -> tuple[_Specs, _Specs]:
        """Blocks for the grid (row, head, query block, key block)."""

        def key(i: Array, j: Array, first: Any) -> Array:
            # Beyond the diagonal the index stands still, so that nothing is fetched.
            return jnp.minimum(j, jax.lax.div(first[0] + (i + 1) * self.query_block - 1, self.key_block))

        return self._specs(
            query=lambda b, h, i, j, first, last: (b, h, i),
            key=lambda b, h, i, j, first, last: (b, jax.lax.div(h, self.groups), key(i, j, first)),
        )

    def specs_by_key(self) -> tuple[_Specs, _Specs]:
        """Blocks for the grid (row, key head, key block, query head of the group, query block)."""

        def query(b: Array, j: Array, i: Array, first: Any, last: Any) -> Array:
            # Before the diagonal and beyond the last query that sees the block, nothing is fetched.
            from_key = jax.lax.div(jnp.maximum(j * self.key_block - first[0], 0), self.query_block)
            to_last = jax.lax.div(jnp.maximum(last[b, j] - 1 - first[0], 0), self.query_block)
            return jnp.minimum(jnp.maximum(jnp.minimum(i, to_last), from_key), self.query_length // self.query_block - 1)

        return self._specs(
            query=lambda b, c, j, h, i, first, last: (b, c * self.groups + h, query(b, j, i, first, last)),
            key=lambda b, c, j, h, i, first, last: (b, c, j),
        )

    def _specs(self, query: Callable[..., Any], key: Callable[..., Any]) -> tuple[_Specs, _Specs]:
        def tokens(block: int, place: Callable[..., Any]) -> pl.BlockSpec:
            return pl.BlockSpec((1, 1, block, self.width), lambda *index: (*place(*index), 0))

        def query_row(*index: Any) -> tuple[Any, ...]:
            b, h, i = query(*index)
            return b, h, 0, i

        def key_row(*index: Any) -> tuple[Any, ...]:
            b, _, j = key(*index)
            return b, 0, j

        return (
            _Specs(tokens(self.query_block, query), pl.BlockSpec((1, 1, 1, self.query_block), query_row)),
            _Specs(tokens(self.key_block, key), pl.BlockSpec((1, 1, self.key_block), key_row)),
        )

    def call(
        self,
        kernel: Callable[..., None],
        *,
        inputs: list[pl.BlockSpec],
        outputs: list[pl.BlockSpec],
        shapes: list[jax.ShapeDtypeStruct],
        scratch: list[Any],
        num_matmuls: int,
        by_key: bool = False,
    ) -> Callable[..., Any]:
        """The kernel over its grid; the last one or two grid dimensions are sequential, they share the scratch."""
        query_blocks, key_blocks = self.query_length // self.query_block, self.length // self.key_block
        if by_key:
            grid = (self.batch, self.kv_heads, key_blocks, self.groups, query_blocks)
        else:
            grid = (self.batch, self.heads, query_blocks, key_blocks)
        pairs = self.batch * self.heads * self.query_length * self.length // 2  # half of them are causal
        tokens = self.batch * (self.heads * self.query_length + self.kv_heads * self.length)
        return pl.pallas_call(
            functools.partial(kernel, exact=self.exact),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=grid,
                in_specs=inputs,
                out_specs=outputs,
                scratch_shapes=scratch,
            ),
            out_shape=shapes,
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3 + ("arbitrary",) * (len(grid) - 3)),
            cost_estimate=pl.CostEstimate(
                flops=2 * num_matmuls * pairs * self.width,
                transcendentals=pairs,
                bytes_accessed=2 * tokens * self.width * self.itemsize,
            ),
            interpret=self.interpret,
            name=f"attention_{kernel.__name__}",
        )


def _block_length(length: int, limit: int) -> int:
    """The largest multiple of 128 up to a limit that divides a length."""
    return next(n for n in range(max(limit // LANES, 1) * LANES, 0, -LANES) if length % n == 0)
