"""What training carries from step to step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32

from actionopd_jax.models import sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Weights, optimizer state and counters; a pytree.

    Attributes:
        params: weights, as `nnx.split` gives them.
        opt_state: of the optax optimizer.
        step: collection steps done, those without any update included.
        bad_steps: optimizer steps skipped because a gradient was NaN or infinite.
        policy_version: optimizer steps that changed the weights: equal versions are equal weights.
    """

    params: nnx.State
    opt_state: optax.OptState
    step: Int32[Array, ""]
    bad_steps: Int32[Array, ""]
    policy_version: Int32[Array, ""]


def create_state(params: nnx.State, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step. It takes the weights over: an update donates their buffers."""
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        step=jnp.zeros((), jnp.int32),
        bad_steps=jnp.zeros((), jnp.int32),
        policy_version=jnp.zeros((), jnp.int32),
    )


def state_shardings(params: nnx.State, optimizer: optax.GradientTransformation, mesh: Mesh) -> TrainState:
    """Where a state lies on a mesh: a sharding for each leaf; moments lie where their weights lie.

    Args:
        params: the weights, or their shapes.
    """
    weights = sharding.weight_shardings(params, mesh)
    whole: Any = NamedSharding(mesh, PartitionSpec())
    opt_state = optax.tree_map_params(
        optimizer,
        lambda _, where: where,
        jax.eval_shape(optimizer.init, params),
        weights,
        transform_non_params=lambda _: whole,
    )
    return TrainState(params=weights, opt_state=opt_state, step=whole, bad_steps=whole, policy_version=whole)


def abstract_state(state: TrainState) -> TrainState:
    """Shapes, dtypes and shardings of a state, without its values: what a checkpoint is restored into."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
