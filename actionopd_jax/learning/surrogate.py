"""The dual-clipped surrogate and the likelihood, as sums over tokens (paper, section 2.3).

    rho    = exp(new - old)
    h      = min(rho A, clip(rho, 1 - eta, 1 + eta) A)
    h_dual = max(h, c A) where A < 0, else h

Sums and counts only: the caller adds them up over micro-batches, devices and hosts and divides once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

# exp overflows beyond 88 in float32. Within this bound nothing is lost: a ratio of e^20 is clipped by
# either rule, and one of e^-20 contributes nothing.
_MAX_LOG_RATIO = 20.0


class SurrogateSums(NamedTuple):
    """Sums over active terms; `ratio_max` is a maximum (0 without any).

    `objective` is to be maximised. `clipped` counts terms whose gradient the clip removed,
    `dual_clipped` those removed by the dual clip. `approx_kl` sums `rho - 1 - log rho`.
    """

    objective: Float[Array, ""]
    num_active: Float[Array, ""]
    clipped: Float[Array, ""]
    dual_clipped: Float[Array, ""]
    ratio: Float[Array, ""]
    ratio_max: Float[Array, ""]
    approx_kl: Float[Array, ""]

    def merge(self, other: "SurrogateSums") -> "SurrogateSums":
        """The sums of both."""
        total = SurrogateSums(*(a + b for a, b in zip(self, other, strict=True)))
        return total._replace(ratio_max=jnp.maximum(self.ratio_max, other.ratio_max))


def dual_clipped_surrogate(
    new_logprobs: Float[Array, "*terms"],
    old_logprobs: Float[Array, "*terms"],
    weight: Float[Array, "*terms"],
    active: Bool[Array, "*terms"],
    eta: float,
    dual_clip: float,
) -> SurrogateSums:
    """Sums of the dual-clipped surrogate; differentiable in `new_logprobs` through `objective`.

    Args:
        new_logprobs: under the weights being trained.
        old_logprobs: under the weights before the update.
        weight: the advantage `A` of each token.
        active: terms that count; the others may hold anything, NaN included.
        eta: clip range, in (0, 1).
        dual_clip: `c`, must exceed 1.

    Raises:
        ValueError: eta or dual_clip out of range.
    """
    if not 0 < eta < 1:
        raise ValueError(f"eta must be in (0, 1), got {eta}")
    if not dual_clip > 1:
        raise ValueError(f"dual_clip must exceed 1, got {dual_clip}")
    log_ratio = _masked(new_logprobs, active) - _masked(jax.lax.stop_gradient(old_logprobs), active)
    log_ratio = jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    advantage = _masked(weight, active)
    ratio = jnp.exp(log_ratio)
    dual = (advantage < 0) & (ratio > dual_clip)
    clipped = ((advantage > 0) & (ratio > 1 + eta)) | ((advantage < 0) & (ratio < 1 - eta))
    bounded = jnp.where(clipped, jnp.clip(ratio, 1 - eta, 1 + eta), ratio)
    h_dual = jnp.where(dual, dual_clip, bounded) * advantage
    fixed = jax.lax.stop_gradient(ratio)
    return SurrogateSums(
        objective=h_dual.sum(),
        num_active=_count(active, h_dual),
        clipped=_count(clipped & active, h_dual),
        dual_clipped=_count(dual & active, h_dual),
        ratio=jnp.where(active, fixed, 0).sum(),
        ratio_max=jnp.where(active, fixed, 0).max(initial=0),
        approx_kl=jnp.where(active, fixed - 1 - jax.lax.stop_gradient(log_ratio), 0).sum(),
    )


def likelihood(
    new_logprobs: Float[Array, "*terms"], weight: Float[Array, "*terms"], active: Bool[Array, "*terms"]
) -> SurrogateSums:
    """Sums of the weighted log-likelihood `w log p`, for distillation on teacher tokens; ratios count as 1."""
    terms = _masked(weight, active) * _masked(new_logprobs, active)
    zero, count = jnp.zeros_like(terms.sum()), _count(active, terms)
    return SurrogateSums(
        objective=terms.sum(),
        num_active=count,
        clipped=zero,
        dual_clipped=zero,
        ratio=count,
        ratio_max=jnp.minimum(count, 1),
        approx_kl=zero,
    )


def _masked(values: Float[Array, "*terms"], active: Bool[Array, "*terms"]) -> Float[Array, "*terms"]:
    return jnp.where(active, values, 0)


def _count(flags: Bool[Array, "*terms"], like: Float[Array, "*terms"]) -> Float[Array, ""]:
    return flags.sum(dtype=jnp.int32).astype(like.dtype)
