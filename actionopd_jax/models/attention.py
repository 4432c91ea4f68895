"""Attention whose whole mask is one integer per key: query i sees key j exactly when `j <= i < end[j]`.

Plain causal rows are the case `end[j] = length of the row`; prefix trees use the end of each token's
subtree in preorder. One function, several implementations: `dense` (the reference), `blockwise` (XLA)
and `pallas` (TPU kernels). The last two need memory linear in length and skip blocks that nobody sees,
forward and backward.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32

from actionopd_jax.errors import ConfigError
from actionopd_jax.models import attention_blockwise, attention_pallas, sharding
from actionopd_jax.models.mesh_axes import AnyMesh, Axes, MeshAxes, fitting_axes, shard_index

Implementation = Literal["auto", "dense", "blockwise", "pallas", "pallas_interpret"]
OUTPUT_NAMES = ("attention_output", "attention_log_total")
"""What a remat policy has to save, by name, so that the backward pass does not compute the attention again."""
_NEVER = -1e30  # finite: a row without any visible key must not produce NaN


def attend(
    q: Float[Array, "B T H C"],
    k: Float[Array, "B T K C"],
    v: Float[Array, "B T K C"],
    end: Int32[Array, "B T"],
    implementation: Implementation = "blockwise",
    block: int | None = None,
    *,
    mesh: AnyMesh | None = None,
    batch_axes: Axes = ("replica", "fsdp"),
    head_axis: str = "tensor",
    context_axis: str = "context",
) -> Float[Array, "B T H C"]:
    """Grouped-query attention, scores divided by sqrt(C), over the keys that `end` makes visible.

    Products add up in float32 whatever the inputs; gradients reach q, k and v.

    On a mesh each device computes its rows, heads and queries; keys and values are gathered along
    `context_axis`. Key heads that do not divide among `head_axis` are repeated until they do. An axis that does
    not divide rows, heads or tokens is not used for them. `dense` is left to XLA's partitioner.

    Args:
        q: queries; H is a multiple of the number of key heads K.
        end: exclusive end of each key's visibility. A query that sees nothing gets zeros.
        implementation: all give the same values up to rounding. `auto` is `pallas` where the program is
            compiled for a TPU (on this machine or ahead of time), else `blockwise`. `pallas_interpret`
            runs the kernels' arithmetic anywhere, slowly.
        block: length of query and key blocks; None: the implementation's own, see its module.
        mesh: default the one in force (`jax.set_mesh`), if any; axes that it lacks are ignored.

    Raises:
        ConfigError: an unknown implementation, or a block length below 1.
    """
    if implementation == "dense":
        return _dense(q, k, v, end)
    mesh = sharding.current_mesh() if mesh is None else mesh
    axes = MeshAxes(
        mesh,
        batch=fitting_axes(mesh, batch_axes, q.shape[0]),
        tensor=fitting_axes(mesh, (head_axis,), q.shape[2]),
        context=fitting_axes(mesh, (context_axis,), q.shape[1]),
    )
    repeats = math.lcm(k.shape[2], axes.size(axes.tensor)) // k.shape[2]
    if repeats > 1:
        k, v = jnp.repeat(k, repeats, axis=2), jnp.repeat(v, repeats, axis=2)
    return _flash(q, k, v, end, _Setting(implementation, block, axes))


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


@dataclasses.dataclass(frozen=True)
class _Setting:
    implementation: Implementation
    block: int | None
    axes: MeshAxes

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 1:
            raise ConfigError(f"attention blocks need a positive length, got {self.block}")

    @property
    def heads(self) -> PartitionSpec:
        """Of `[B, T, H or K, C]`."""
        return PartitionSpec(self.axes.batch, self.axes.context, self.axes.tensor)

    @property
    def tokens(self) -> PartitionSpec:
        """Of `[B, T]`."""
        return PartitionSpec(self.axes.batch, self.axes.context)

    @property
    def totals(self) -> PartitionSpec:
        """Of `[B, H, T]`."""
        return PartitionSpec(self.axes.batch, self.axes.tensor, self.axes.context)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _flash(q: Array, k: Array, v: Array, end: Array, setting: _Setting) -> Array:
    return _flash_forward(q, k, v, end, setting)[0]


def _flash_forward(q: Array, k: Array, v: Array, end: Array, setting: _Setting) -> tuple[Array, tuple[Array, ...]]:
    axes, heads = setting.axes, setting.heads

    def shard(q: Array, k: Array, v: Array, end: Array) -> tuple[Array, Array]:
        first_query = shard_index(axes.context) * q.shape[1]
        k, v, end = (axes.gather(x, 1) for x in (k, v, end))
        return _on_platform("forward", setting, q, k, v, end, first_query)

    out, log_total = axes.run(shard, (heads, heads, heads, setting.tokens), (heads, setting.totals), q, k, v, end)
    out, log_total = (checkpoint_name(x, name) for x, name in zip((out, log_total), OUTPUT_NAMES, strict=True))
    return out, (q, k, v, end, out, log_total)


def _flash_backward(setting: _Setting, saved: tuple[Array, ...], grad: Array) -> tuple[Array, Array, Array, None]:
    axes, heads = setting.axes, setting.heads

    def shard(
        q: Array, k: Array, v: Array, end: Array, out: Array, log_total: Array, grad: Array
    ) -> tuple[Array, Array, Array]:
        first_query = shard_index(axes.context) * q.shape[1]
        k, v, end = (axes.gather(x, 1) for x in (k, v, end))
        delta = jnp.einsum("bthc,bthc->bht", out, grad, preferred_element_type=jnp.float32)
        d_q, d_k, d_v = _on_platform("backward", setting, q, k, v, end, first_query, log_total, delta, grad)
        return d_q, axes.scatter_sum(d_k, 1), axes.scatter_sum(d_v, 1)

    inputs = (heads, heads, heads, setting.tokens, heads, setting.totals, heads)
    return *axes.run(shard, inputs, (heads, heads, heads), *saved, grad), None


_flash.defvjp(_flash_forward, _flash_backward)


def _on_platform(direction: Literal["forward", "backward"], setting: _Setting, *args: Array) -> Any:
    """One direction by the chosen implementation, or by the platform for which the program is lowered."""
    blockwise = functools.partial(getattr(attention_blockwise, direction), block=setting.block or attention_blockwise.BLOCK)
    pallas = functools.partial(getattr(attention_pallas, direction), block=setting.block or attention_pallas.BLOCK)
    match setting.implementation:
        case "blockwise":
            return blockwise(*args)
        case "pallas":
            return pallas(*args)
        case "pallas_interpret":
            return pallas(*args, interpret=True)
        case "auto":
            return jax.lax.platform_dependent(*args, tpu=pallas, default=blockwise)
        case other:
            raise ConfigError(f"attention implementation {other!r} is unknown; choose auto, dense, blockwise or pallas")
