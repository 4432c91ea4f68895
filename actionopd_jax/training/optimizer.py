"""The optimizer: global-norm clipping, AdamW, a learning rate that warms up and then stays or decays."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from actionopd_jax.config import UpdateConfig
from actionopd_jax.training.state import TrainState


def make_optimizer(config: UpdateConfig) -> optax.GradientTransformation:
    """The optax chain of the settings."""
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            learning_rate_schedule(config),
            b1=config.adam_b1,
            b2=config.adam_b2,
            eps=config.adam_eps,
            mu_dtype=jnp.bfloat16 if config.adam_mu_dtype == "bfloat16" else None,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )


def learning_rate_schedule(config: UpdateConfig) -> optax.Schedule:
    """The learning rate at optimizer step n = 0, 1, …

    `learning_rate * min(1, (n + 1) / warmup_steps)`; with a decay, from step `warmup_steps` on, over d =
    `decay_steps` and with x = min(1, (n - warmup_steps) / d), `final + (learning_rate - final) * f(x)`
    where f is `1 - x` (linear) or `(1 + cos(pi x)) / 2` (cosine).
    """

    def schedule(count: jax.typing.ArrayLike) -> Array:
        fraction = (jnp.asarray(count) + 1) / max(config.warmup_steps, 1)
        warm = config.learning_rate * jnp.minimum(fraction, 1.0)
        if config.schedule == "constant":
            return warm
        x = jnp.clip((jnp.asarray(count) - config.warmup_steps) / config.decay_steps, 0.0, 1.0)
        left = 1 - x if config.schedule == "linear" else (1 + jnp.cos(jnp.pi * x)) / 2
        decayed_rate = config.final_learning_rate + (config.learning_rate - config.final_learning_rate) * left
        return jnp.where(jnp.asarray(count) < config.warmup_steps, warm, decayed_rate)

    return schedule


def decayed(params: Any) -> Any:
    """True for the weights that decay: matrices, not biases nor the scales of norms (stacked by layer or not)."""

    def decays(path: tuple[Any, ...], leaf: Array) -> bool:
        name = jax.tree_util.keystr(path).lower()
        return leaf.ndim >= 2 and "norm" not in name and "bias" not in name

    return jax.tree_util.tree_map_with_path(decays, params)


def apply_gradients(
    optimizer: optax.GradientTransformation, state: TrainState, grads: Any
) -> tuple[TrainState, Float[Array, ""]]:
    """One optimizer step; with a NaN or infinite gradient, none: only `bad_steps` counts it.

    Args:
        optimizer: from `make_optimizer`.
        state: before the step.
        grads: gradient of the loss to minimise, shaped like `state.params`.

    Returns:
        The state after it, and the global norm of the gradient before clipping.
    """
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)

    def keep(new: Array, old: Array) -> Array:
        return jnp.where(finite, new, old)

    changed = finite.astype(jnp.int32)
    after = dataclasses.replace(
        state,
        params=jax.tree.map(keep, params, state.params),
        opt_state=jax.tree.map(keep, opt_state, state.opt_state),
        bad_steps=state.bad_steps + 1 - changed,
        policy_version=state.policy_version + changed,
    )
    return after, grad_norm
