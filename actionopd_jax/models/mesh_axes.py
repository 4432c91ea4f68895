"""Which mesh axes carry rows, heads or vocabulary, and context; numeric code runs per shard along them.

Code that XLA would partition badly (loops over blocks) or not at all (Pallas kernels) is written for one
shard, with its collectives by name; the same function serves a single device.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Int32

Axes = tuple[str, ...]
AnyMesh = Mesh | AbstractMesh


def fitting_axes(mesh: AnyMesh | None, axes: Axes, length: int) -> Axes:
    """Of the named axes those that the mesh has and that divide a dimension together, outermost first.

    Along a left-out axis the dimension stays whole: every device along it does the same work.
    """
    sizes = {} if mesh is None else mesh.shape
    kept: Axes = ()
    for axis in axes:
        if axis in sizes and length % math.prod(sizes[a] for a in (*kept, axis)) == 0:
            kept += (axis,)
    return kept


@dataclasses.dataclass(frozen=True)
class MeshAxes:
    """A mesh and the roles of its axes, all of which it has; see `fitting_axes`.

    Args:
        mesh: None for one device, or to leave the partitioning to XLA.
        batch: axes over which rows are spread.
        tensor: axes over which heads or vocabulary are spread.
        context: axes over which the tokens of a row are spread.
    """

    mesh: AnyMesh | None
    batch: Axes
    tensor: Axes
    context: Axes

    def run(self, function: Callable[..., Any], inputs: tuple[PartitionSpec, ...], outputs: Any, *args: Array) -> Any:
        """`function(*args)` on every shard; without a mesh, directly."""
        if self.mesh is None:
            return function(*args)
        # Replication is not tracked: Pallas calls cannot declare it, and every collective is written out.
        return jax.shard_map(function, mesh=self.mesh, in_specs=inputs, out_specs=outputs, check_vma=False)(*args)

    def size(self, axes: Axes) -> int:
        """Number of shards along some axes."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes)

    def gather(self, x: Array, dimension: int) -> Array:
        """The whole of a dimension that is spread over context (inside `run`)."""
        return jax.lax.all_gather(x, self.context, axis=dimension, tiled=True) if self.context else x

    def scatter_sum(self, x: Array, dimension: int) -> Array:
        """The own part of the sum over context, added in float32 at least (inside `run`)."""
        if not self.context:
            return x
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        return jax.lax.psum_scatter(wide, self.context, scatter_dimension=dimension, tiled=True).astype(x.dtype)


def shard_index(axes: Axes) -> Int32[Array, ""]:
    """Number of the own shard along some axes, 0 without any (inside `MeshAxes.run`)."""
    return jax.lax.axis_index(axes) if axes else jnp.int32(0)
