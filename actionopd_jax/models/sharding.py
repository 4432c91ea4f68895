"""Where weights and activations lie on a mesh: names of dimensions, and one table from them to mesh axes.

Every dimension of every weight has a logical name; `MESH_RULES` maps the names to the mesh axes
`replica`, `fsdp`, `tensor`, `context`. Weights rest split over `fsdp` (and `context`) and are gathered
layer by layer while they are used. Between layers the tokens of a bin are split over `context` and
`tensor`, so that what the backward pass keeps is split too. Without a mesh (`jax.set_mesh`) every
function here leaves its arguments alone.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from actionopd_jax.config import MeshConfig
from actionopd_jax.errors import ConfigError

T = TypeVar("T")
Rules = Mapping[str, tuple[str, ...]]

MESH_AXES = ("replica", "fsdp", "tensor", "context")

WEIGHT_AXES: Mapping[str, tuple[str, ...]] = {
    "embedding": ("vocab", "embed"),
    "head": ("vocab", "embed"),
    "final_norm": ("norm",),
    "layers.attention_norm": ("layers", "norm"),
    "layers.query": ("layers", "embed", "heads", "head_dim"),
    "layers.key": ("layers", "embed", "kv_heads", "head_dim"),
    "layers.value": ("layers", "embed", "kv_heads", "head_dim"),
    "layers.query_bias": ("layers", "heads", "head_dim"),
    "layers.key_bias": ("layers", "kv_heads", "head_dim"),
    "layers.value_bias": ("layers", "kv_heads", "head_dim"),
    "layers.output_bias": ("layers", "norm"),
    "layers.query_norm": ("layers", "head_dim"),
    "layers.key_norm": ("layers", "head_dim"),
    "layers.output": ("layers", "heads", "head_dim", "embed"),
    "layers.mlp_norm": ("layers", "norm"),
    "layers.gate": ("layers", "embed", "mlp"),
    "layers.up": ("layers", "embed", "mlp"),
    "layers.down": ("layers", "mlp", "embed"),
}
"""Logical names of the dimensions of each weight of the decoder."""

MESH_RULES: Rules = {
    # weights
    "vocab": ("tensor",),
    "embed": ("fsdp", "context"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "layers": (),
    "head_dim": (),
    "norm": (),
    # activations
    "batch": ("replica", "fsdp"),
    "length": ("context",),
    "length_between_layers": ("context", "tensor"),
}
"""Logical dimension -> the mesh axes that split it, outermost first."""

_GATHERED_AXES = ("fsdp", "context")  # weights in use are whole along these


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh of the settings, neighbouring devices along `tensor` and `context`.

    Args:
        config: sizes of the axes.
        devices: default all devices of all processes.

    Raises:
        ConfigError: the sizes do not use up the devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = tuple(getattr(config, axis) for axis in MESH_AXES)
    if config.num_devices != len(devices):
        sizes = " x ".join(f"{axis}={size}" for axis, size in zip(MESH_AXES, shape, strict=True))
        raise ConfigError(f"mesh {sizes} has {config.num_devices} devices, but there are {len(devices)}: change mesh.fsdp")
    grid = mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def mesh_axes(name: str, logical: Sequence[str], rules: Rules = MESH_RULES) -> list[tuple[str, ...]]:
    """Mesh axes of each dimension of an array.

    Raises:
        ValueError: a dimension without a rule, or two dimensions on one mesh axis.
    """
    axes: list[tuple[str, ...]] = []
    taken: dict[str, str] = {}
    for dimension in logical:
        if dimension not in rules:
            raise ValueError(f"{name}: dimension {dimension} has no mesh axes; add it to MESH_RULES")
        for axis in rules[dimension]:
            if axis in taken:
                raise ValueError(f"{name}: dimensions {taken[axis]} and {dimension} are both split over mesh axis {axis}")
            taken[axis] = dimension
        axes.append(rules[dimension])
    return axes


def weight_spec(name: str, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """How a weight rests on a mesh.

    Args:
        name: as in `WEIGHT_AXES`.
        shape: of the whole weight.
        sizes: of the mesh axes.

    Raises:
        ConfigError: a dimension that its mesh axes do not divide. `kv_heads` alone stays whole then.
        ValueError: an unknown weight.
    """
    return _spec(_weight_axes(name, shape, sizes))


def _weight_axes(name: str, shape: Sequence[int], sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    if name not in WEIGHT_AXES:
        raise ValueError(f"weight {name} has no logical axes; add it to WEIGHT_AXES")
    logical = WEIGHT_AXES[name]
    kept: list[tuple[str, ...]] = []
    for index, (dimension, axes) in enumerate(zip(logical, mesh_axes(name, logical), strict=True)):
        ways = math.prod(sizes[axis] for axis in axes)
        if shape[index] % ways == 0:
            kept.append(axes)
        elif dimension == "kv_heads":
            kept.append(())
        else:
            over = " x ".join(f"{axis}={sizes[axis]}" for axis in axes)
            raise ConfigError(
                f"weight {name}: dimension {index} ({dimension}, {shape[index]}) is not divisible by mesh axis {over}; "
                f"change mesh.{' or mesh.'.join(axes)}"
            )
    return kept


def _spec(axes: Sequence[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(each or None for each in axes))


def weight_name(path: Sequence[Any]) -> str:
    """The name in `WEIGHT_AXES` of a leaf of `nnx.split(model)[1]`, from its path."""
    return ".".join(entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey))


def weight_shardings(params: T, mesh: Mesh) -> T:
    """A sharding for each weight of `nnx.split(model)[1]`, or of a tree of their shapes."""

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, weight_spec(weight_name(path), leaf.shape, mesh.shape))

    return jax.tree_util.tree_map_with_path(sharding, params)


def replicated_kv_heads(num_kv_heads: int, config: MeshConfig) -> str | None:
    """One line where key and value weights stay whole along `tensor`, which does not divide their heads."""
    if num_kv_heads % config.tensor == 0:
        return None
    return f"{num_kv_heads} key/value heads are not divisible by mesh.tensor={config.tensor}: every device holds all of them"


def current_mesh() -> AbstractMesh | None:
    """The mesh in force (`jax.set_mesh`); None without one."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def _axis_sizes() -> Mapping[str, int]:
    mesh = current_mesh()
    return {} if mesh is None else mesh.shape


def activation_spec(shape: Sequence[int], logical: Sequence[str | None], sizes: Mapping[str, int]) -> PartitionSpec:
    """How an activation is split; a dimension keeps the leading mesh axes that divide it, the rest leave it whole."""
    named = [dimension for dimension in logical if dimension is not None]
    axes_of = dict(zip(named, mesh_axes("activation", named), strict=True))
    spec: list[tuple[str, ...]] = []
    for size, dimension in zip(shape, logical, strict=True):
        kept: list[str] = []
        for axis in axes_of.get(dimension or "", ()):
            if size % math.prod(sizes[a] for a in (*kept, axis)):
                break
            kept.append(axis)
        spec.append(tuple(kept))
    return _spec(spec)


def constrain(x: Shaped[Array, "..."], *logical: str | None) -> Shaped[Array, "..."]:
    """Splits an activation as the rules say. `logical` names each dimension; None leaves it whole."""
    sizes = _axis_sizes()
    if not sizes:
        return x
    return jax.lax.with_sharding_constraint(x, activation_spec(x.shape, logical, sizes))


def gathered(name: str, weight: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """A weight as it is used: whole along `fsdp` and `context`; its gradient goes back to where the weight rests.

    Args:
        name: as in `WEIGHT_AXES`.
        weight: whole, or one layer of a stacked one.
    """
    sizes = _axis_sizes()
    if not sizes:
        return weight
    is_slice = len(WEIGHT_AXES[name]) == weight.ndim + 1
    rests = _weight_axes(name, (1, *weight.shape) if is_slice else weight.shape, sizes)[is_slice:]
    used = [tuple(axis for axis in axes if axis not in _GATHERED_AXES) for axes in rests]
    return _relayout(_spec(used), _spec(rests), weight)


def gathered_layer(params: dict[str, Array], dtype: Any) -> dict[str, Array]:
    """Weights of one layer, or of all, as they are used; matrices in the computation dtype, which halves what moves."""
    if not _axis_sizes():
        return params

    def used(name: str, weight: Array) -> Array:
        return gathered(f"layers.{name}", weight if name.endswith("_norm") else weight.astype(dtype))

    return {name: used(name, weight) for name, weight in params.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _relayout(used: PartitionSpec, rests: PartitionSpec, weight: Array) -> Array:
    del rests
    return jax.lax.with_sharding_constraint(weight, used)


def _relayout_forward(used: PartitionSpec, rests: PartitionSpec, weight: Array) -> tuple[Array, None]:
    return _relayout(used, rests, weight), None


def _relayout_backward(used: PartitionSpec, rests: PartitionSpec, saved: None, gradient: Array) -> tuple[Array]:
    del used, saved
    return (jax.lax.with_sharding_constraint(gradient, rests),)


_relayout.defvjp(_relayout_forward, _relayout_backward)


def put_batch(values: np.ndarray, mesh: Mesh) -> Array:
    """A batch on the mesh, split along its first dimension; every process holds all of `values`."""
    sharding = NamedSharding(mesh, activation_spec(values.shape, ("batch", *[None] * (values.ndim - 1)), mesh.shape))
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])


def place(values: T, shardings: T) -> T:
    """Arrays where `shardings` says; every process holds all of `values`, or they lie there already."""

    def one(value: Any, where: NamedSharding) -> Array:
        if isinstance(value, jax.Array) and value.sharding == where:
            return value
        if where.is_fully_addressable:
            return jax.device_put(value, where)
        host = np.asarray(value)
        return jax.make_array_from_callback(host.shape, where, lambda index: host[index])

    return jax.tree.map(one, values, shardings)
