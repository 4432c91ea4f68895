"""Log-probabilities of chosen tokens, in chunks: of tokens x vocabulary only one small rectangle exists at a time.

Both passes go over the vocabulary outside and over the tokens inside: so each part of the head is read once,
and each part of its gradient is finished, summed over the devices and rounded once.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int32

from actionopd_jax.models import sharding
from actionopd_jax.models.mesh_axes import AnyMesh, Axes, MeshAxes, fitting_axes, shard_index

TOKENS = 512  # per chunk: some hundred products for each weight read keep an accelerator computing, not loading
VOCABULARY = 8192  # per chunk: 512 x 8192 float32 logits are 16 MiB; vocabularies of small models need one chunk
_NEVER = -1e30  # finite: below every logit


class TokenScores(NamedTuple):
    """Per loss term: log-probability and entropy (nats) at the temperature, and whether greedy decoding picks the target."""

    logprobs: Float32[Array, "B L"]
    entropy: Float32[Array, "B L"]
    is_argmax: Bool[Array, "B L"]


def token_logprobs(
    hidden: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    source: Int32[Array, "B L"],
    target: Int32[Array, "B L"],
    temperature: float,
    *,
    mesh: AnyMesh | None = None,
    batch_axes: Axes = ("replica", "fsdp"),
    vocab_axis: str = "tensor",
    context_axis: str = "context",
) -> TokenScores:
    """Scores `log softmax(head @ hidden[source] / temperature)[target]` over the full vocabulary (paper, A.4).

    Logits and all sums are float32. Gradients reach `hidden` and `head` through the log-probabilities alone.

    On a mesh each device scores its part of the rows and terms against its part of the vocabulary. An axis that
    does not divide its dimension is not used for it.

    Args:
        source: index along T of the hidden state that predicts the target.
        target: ids below V. Of equal logits greedy decoding picks the lowest id.
        temperature: positive; the rollout's.
        mesh: default the one in force (`jax.set_mesh`), if any; axes that it lacks are ignored.
    """
    mesh = sharding.current_mesh() if mesh is None else mesh
    rows = jnp.take_along_axis(hidden, source[..., None], axis=1)
    axes = MeshAxes(
        mesh,
        batch=fitting_axes(mesh, batch_axes, rows.shape[0]),
        tensor=fitting_axes(mesh, (vocab_axis,), head.shape[0]),
        context=fitting_axes(mesh, (context_axis,), rows.shape[1]),
    )
    return _score(rows, head, target, _Setting(temperature, axes))


@dataclasses.dataclass(frozen=True)
class _Setting:
    temperature: float
    axes: MeshAxes

    @property
    def terms(self) -> PartitionSpec:
        """Of `[B, L]` and `[B, L, D]`."""
        return PartitionSpec(self.axes.batch, self.axes.context)

    @property
    def head(self) -> PartitionSpec:
        """Of `[V, D]`."""
        return PartitionSpec(self.axes.tensor)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _score(rows: Array, head: Array, target: Array, setting: _Setting) -> TokenScores:
    return _score_forward(rows, head, target, setting)[0]


def _score_forward(rows: Array, head: Array, target: Array, setting: _Setting) -> tuple[TokenScores, tuple[Array, ...]]:
    def shard(rows: Array, head: Array, target: Array) -> tuple[Array, ...]:
        first_id = shard_index(setting.axes.tensor) * head.shape[0]
        sums = _sweep(_in_chunks(rows), head, _in_chunks(target), first_id, setting.temperature)
        sums = _merge_shards(sums, setting.axes.tensor)
        log_total = sums.peak + jnp.log(sums.total)
        # With the peak taken out of the sum of -p log p: exact where one token has nearly all the probability.
        entropy = jnp.log(sums.total) - sums.weighted / sums.total
        results = (sums.chosen - log_total, entropy, sums.best == _in_chunks(target), log_total)
        return tuple(_out_of_chunks(x, target.shape) for x in results)

    inputs, outputs = (setting.terms, setting.head, setting.terms), (setting.terms,) * 4
    logprobs, entropy, is_argmax, log_total = setting.axes.run(shard, inputs, outputs, rows, head, target)
    return TokenScores(logprobs, entropy, is_argmax), (rows, head, target, log_total)


def _score_backward(setting: _Setting, saved: tuple[Array, ...], grads: TokenScores) -> tuple[Array, Array, None]:
    axes = setting.axes

    def shard(rows: Array, head: Array, *terms: Array) -> tuple[Array, Array]:
        first_id = shard_index(axes.tensor) * head.shape[0]
        chunks = _Chunk(*(_in_chunks(x) for x in (rows, *terms)))
        d_rows, d_head = _sweep_back(chunks, head, first_id, setting.temperature, axes.batch + axes.context)
        return jax.lax.psum(_out_of_chunks(d_rows, rows.shape), axes.tensor).astype(rows.dtype), d_head

    inputs = (setting.terms, setting.head, *(setting.terms,) * 3)
    d_rows, d_head = axes.run(shard, inputs, (setting.terms, setting.head), *saved, grads.logprobs)
    return d_rows, d_head, None


_score.defvjp(_score_forward, _score_backward)


def _chunks(length: int, limit: int) -> tuple[int, int]:
    """How many chunks of at most `limit`, and their length, as even as can be."""
    count = max(-(-length // limit), 1)
    return count, -(-length // count)


def _in_chunks(x: Array) -> Array:
    """Terms `[B, L, ...]` as `[N, n, ...]`, zeros behind the last."""
    num_terms = x.shape[0] * x.shape[1]
    count, length = _chunks(num_terms, TOKENS)
    x = x.reshape(num_terms, *x.shape[2:])
    x = jnp.pad(x, ((0, count * length - num_terms), *((0, 0),) * (x.ndim - 1)))
    return x.reshape(count, length, *x.shape[1:])


def _out_of_chunks(x: Array, shape: tuple[int, ...]) -> Array:
    return x.reshape(-1, *x.shape[2:])[: shape[0] * shape[1]].reshape(shape)


class _Part(NamedTuple):
    """One chunk of the vocabulary. The last is drawn back to end with the vocabulary; ids below `fresh` are old ones."""

    weights: Float[Array, "W D"]
    first: Int32[Array, ""]
    fresh: Int32[Array, ""]

    @classmethod
    def of(cls, head: Array, index: Array, length: int) -> "_Part":
        first = jnp.minimum(index * length, head.shape[0] - length)
        return cls(jax.lax.dynamic_slice_in_dim(head, first, length), first, index * length - first)

    def logits(self, rows: Float[Array, "n D"], temperature: float) -> Float32[Array, "n W"]:
        """Divided by the temperature; far below all others where the id is an old one."""
        logits = jnp.einsum("nd,vd->nv", rows, self.weights, preferred_element_type=jnp.float32) / temperature
        return jnp.where(jnp.arange(logits.shape[1]) < self.fresh, _NEVER, logits)


class _Sums(NamedTuple):
    """Of each term over the ids so far. `total` sums `exp(logit - peak)`, `weighted` that times `logit - peak`."""

    peak: Float32[Array, "*terms"]
    total: Float32[Array, "*terms"]
    weighted: Float32[Array, "*terms"]
    chosen: Float32[Array, "*terms"]
    best: Int32[Array, "*terms"]


def _sweep(
    rows: Float[Array, "N n D"], head: Float[Array, "V D"], target: Int32[Array, "N n"], first_id: Array, temperature: float
) -> _Sums:
    count, length = _chunks(head.shape[0], VOCABULARY)

    def one_part(index: Array, sums: _Sums) -> _Sums:
        part = _Part.of(head, index, length)

        def one_chunk(args: tuple[_Sums, Array, Array]) -> _Sums:
            old, x, ids = args
            logits = part.logits(x, temperature)
            ids = ids - first_id - part.first
            is_here = (ids >= part.fresh) & (ids < length)
            here = jnp.take_along_axis(logits, jnp.clip(ids, 0, length - 1)[:, None], axis=1)[:, 0]
            highest = logits.max(axis=1)
            best = jnp.where(logits == highest[:, None], jnp.arange(length), length).min(axis=1)
            peak = jnp.maximum(old.peak, highest)
            below = logits - peak[:, None]
            weights = jnp.exp(below)
            total, weighted = _fade(old, peak)
            return _Sums(
                peak,
                total + weights.sum(axis=1),
                weighted + (weights * below).sum(axis=1),
                jnp.where(is_here, here, old.chosen),
                jnp.where(highest > old.peak, best + first_id + part.first, old.best),
            )

        return jax.lax.map(one_chunk, (sums, rows, target))

    zeros = jnp.zeros(target.shape, jnp.float32)
    return jax.lax.fori_loop(0, count, one_part, _Sums(zeros + _NEVER, zeros, zeros, zeros, jnp.zeros_like(target)))


def _fade(sums: _Sums, peak: Array) -> tuple[Array, Array]:
    """`total` and `weighted` for a higher peak."""
    drop = sums.peak - peak
    factor = jnp.exp(drop)
    return sums.total * factor, (sums.weighted + drop * sums.total) * factor


def _merge_shards(sums: _Sums, axes: Axes) -> _Sums:
    """Sums over the whole vocabulary from those of its shards."""
    if not axes:
        return sums
    peak = jax.lax.pmax(sums.peak, axes)
    total, weighted = _fade(sums, peak)
    best = jax.lax.pmin(jnp.where(sums.peak == peak, sums.best, jnp.iinfo(jnp.int32).max), axes)
    total, weighted, chosen = jax.lax.psum((total, weighted, sums.chosen), axes)
    return _Sums(peak, total, weighted, chosen, best)


class _Chunk(NamedTuple):
    """What the backward pass knows of each term; `grad` is that of its log-probability."""

    rows: Float[Array, "*terms D"]
    target: Int32[Array, "*terms"]
    log_total: Float32[Array, "*terms"]
    grad: Float32[Array, "*terms"]


def _sweep_back(
    chunks: _Chunk, head: Float[Array, "V D"], first_id: Array, temperature: float, sum_over: Axes
) -> tuple[Float32[Array, "N n D"], Float[Array, "V D"]]:
    """Gradients of the rows (this vocabulary's part) and of the head (of all devices along `sum_over`)."""
    count, length = _chunks(head.shape[0], VOCABULARY)

    def one_part(step: Array, grads: tuple[Array, Array]) -> tuple[Array, Array]:
        # From the last part to the first: the last writes zeros for ids that the one before it then overwrites.
        part = _Part.of(head, count - 1 - step, length)

        def one_chunk(d_weights: Array, args: tuple[_Chunk, Array]) -> tuple[Array, Array]:
            chunk, d_rows = args
            weights = jnp.exp(part.logits(chunk.rows, temperature) - chunk.log_total[:, None])
            ids = (chunk.target - first_id - part.first)[:, None]
            is_target = (jnp.arange(length) == ids) & (ids >= part.fresh)
            d_logits = (is_target - weights) * (chunk.grad / temperature)[:, None]
            d_logits = d_logits.astype(head.dtype)
            d_rows += jnp.einsum("nv,vd->nd", d_logits, part.weights, preferred_element_type=jnp.float32)
            d_weights += jnp.einsum("nv,nd->vd", d_logits, chunk.rows, preferred_element_type=jnp.float32)
            return d_weights, d_rows

        d_rows, d_head = grads
        start = jnp.zeros(part.weights.shape, jnp.float32)
        d_weights, d_rows = jax.lax.scan(one_chunk, start, (chunks, d_rows))
        d_weights = jax.lax.psum(d_weights, sum_over).astype(head.dtype)
        return d_rows, jax.lax.dynamic_update_slice_in_dim(d_head, d_weights, part.first, axis=0)

    start = (jnp.zeros(chunks.rows.shape, jnp.float32), jnp.zeros_like(head))
    return jax.lax.fori_loop(0, count, one_part, start)
