"""What every method is to the loop: a collector of states and responses, and a scorer of their tokens."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

from actionopd_jax.records import Example
from actionopd_jax.rollout.trajectory import TaskStart

Figures = dict[str, float]
"""Figures of one step; one that has nothing to be averaged over is absent."""


@dataclasses.dataclass(frozen=True)
class Collected:
    """What a step gives to the update: weighted token sequences, and the step's figures."""

    examples: Sequence[Example]
    figures: Figures


class Method(Protocol):
    """One way of turning task starts into examples."""

    @property
    def objective(self) -> Literal["surrogate", "likelihood"]:
        """How the update reads the weights of an example: advantages of the clipped surrogate, or of a likelihood."""
        ...

    @property
    def temperature(self) -> float:
        """Of the softmax in the update."""
        ...

    async def collect(self, starts: Sequence[TaskStart], step: int, policy_version: int) -> Collected:
        """Collects a step under one snapshot of the student. Raises `ServiceError` when a service failed for good."""
        ...
