"""Advantages over the kept groups of a batch (paper, section 2.3).

kept groups:  supervision available and max r - min r > 1e-8
centred:      c_gi = r_gi - mean_j r_gj
advantage:    A_gi = c_gi / (sigma + epsilon),  sigma = population std of all c in all kept groups

The standard deviation is one number: groups with larger reward gaps weigh more.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

REWARD_RANGE_MIN = 1e-8
"""A group whose rewards differ by no more than this carries no signal."""


@dataclasses.dataclass(frozen=True, slots=True)
class Advantages:
    """`kept[k]` is the index of a group, `values[k]` the advantages of its candidates, `sigma` one number for the batch."""

    kept: tuple[int, ...]
    values: tuple[Float64[np.ndarray, " candidates"], ...]
    sigma: float


def compute_advantages(rewards: Sequence[Float64[np.ndarray, " candidates"] | None], epsilon: float) -> Advantages:
    """Advantages of the groups that carry signal.

    Args:
        rewards: one vector per group; None for a group without supervision.
        epsilon: added to sigma.

    Returns:
        The kept groups; nothing is kept of an empty batch, and sigma is then 0.

    Raises:
        ValueError: an epsilon that is not positive, an empty group, or a reward that is not finite.
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon must be positive, got {epsilon}")
    kept: list[int] = []
    centred: list[np.ndarray] = []
    for index, given in enumerate(rewards):
        if given is None:
            continue
        group = np.asarray(given, np.float64)
        if group.size == 0 or not np.isfinite(group).all():
            raise ValueError(f"group {index} has no rewards or one that is not finite: {group.tolist()}")
        if group.max() - group.min() > REWARD_RANGE_MIN:
            kept.append(index)
            centred.append(group - group.mean())
    if not kept:
        return Advantages((), (), 0.0)
    sigma = float(np.std(np.concatenate(centred)))
    return Advantages(tuple(kept), tuple(group / (sigma + epsilon) for group in centred), sigma)
