"""Rewards of student responses, and the figures that explain their mean (paper, section 2.2).

    r = -1                          the response is no action
    r =  0                          valid, matches no teacher sample
    r =  1 + lambda (c - 1)/(K - 1) valid, matches c > 0 of the teacher samples   (K = 1: r = 1)

`K` is the nominal number of teacher samples, also where fewer valid ones were retained.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from actionopd_jax.records import Invalid, StateGroup

RewardKind = Literal["agreement", "validity", "constant", "shuffled"]


def _check(num_teacher_samples: int, frequency_bonus: float) -> None:
    if num_teacher_samples < 1:
        raise ValueError(f"num_teacher_samples (K) must be at least 1, got {num_teacher_samples}")
    if not frequency_bonus >= 0 or not math.isfinite(frequency_bonus):
        raise ValueError(f"frequency_bonus (lambda) must be finite and not negative, got {frequency_bonus}")


def agreement_reward(match_count: int, valid: bool, *, num_teacher_samples: int, frequency_bonus: float) -> float:
    """Semantic agreement with the teacher multiset (paper, section 2.2).

    Args:
        match_count: `c`, matching samples among those retained; multiplicity counts.
        valid: whether the response is an action at all.
        num_teacher_samples: `K`, the nominal number.
        frequency_bonus: `lambda`.

    Raises:
        ValueError: K < 1, lambda < 0, or a match count outside [0, K], or a match of an invalid response.
    """
    _check(num_teacher_samples, frequency_bonus)
    if not 0 <= match_count <= num_teacher_samples:
        raise ValueError(f"match count {match_count} is outside [0, {num_teacher_samples}]")
    if not valid:
        if match_count:
            raise ValueError(f"an invalid response cannot match, got match count {match_count}")
        return -1.0
    if match_count == 0:
        return 0.0
    if num_teacher_samples == 1:
        return 1.0
    return 1.0 + frequency_bonus * (match_count - 1) / (num_teacher_samples - 1)


def validity_reward(valid: bool) -> float:
    """+1 for an action, -1 otherwise: the ablation that never asks the matcher."""
    return 1.0 if valid else -1.0


def constant_reward() -> float:
    """0 for every response: the control without any signal (no group is ever kept)."""
    return 0.0


def reward(kind: RewardKind, match_count: int, valid: bool, *, num_teacher_samples: int, frequency_bonus: float) -> float:
    """The reward of the named kind; of `shuffled`, what the response has before the group's are permuted."""
    match kind:
        case "agreement" | "shuffled":
            return agreement_reward(
                match_count, valid, num_teacher_samples=num_teacher_samples, frequency_bonus=frequency_bonus
            )
        case "validity":
            return validity_reward(valid)
        case "constant":
            return constant_reward()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RewardSummary:
    """Means over all candidates of the supervised groups.

    Attributes:
        coverage: `C`, mean match count.
        any_match: `U`, fraction with at least one match.
        invalid: `V`, fraction that is no action.
        mean_reward: mean reward.
        alpha: `lambda / (K - 1)`; 0 for K = 1, where C = U and any value gives the same.
        residual: `mean_reward - (alpha C + (1 - alpha) U - V)`; 0 up to rounding for agreement rewards.
        num_groups: supervised groups.
        num_unsupervised: groups left out.
        num_candidates: candidates averaged over; without any, all means are 0.
    """

    coverage: float
    any_match: float
    invalid: float
    mean_reward: float
    alpha: float
    residual: float
    num_groups: int
    num_unsupervised: int
    num_candidates: int


def summarise(groups: Sequence[StateGroup], *, num_teacher_samples: int, frequency_bonus: float) -> RewardSummary:
    """C, U, V and the mean reward of a step's groups; groups without supervision are left out."""
    _check(num_teacher_samples, frequency_bonus)
    alpha = frequency_bonus / (num_teacher_samples - 1) if num_teacher_samples > 1 else 0.0
    supervised = [group for group in groups if group.supervised]
    candidates = [candidate for group in supervised for candidate in group.candidates]
    count = max(len(candidates), 1)
    coverage = math.fsum(c.match_count for c in candidates) / count
    any_match = math.fsum(c.match_count > 0 for c in candidates) / count
    invalid = math.fsum(isinstance(c.action, Invalid) for c in candidates) / count
    mean = math.fsum(c.reward for c in candidates if c.reward is not None) / count
    return RewardSummary(
        coverage=coverage,
        any_match=any_match,
        invalid=invalid,
        mean_reward=mean,
        alpha=alpha,
        residual=mean - (alpha * coverage + (1 - alpha) * any_match - invalid),
        num_groups=len(supervised),
        num_unsupervised=len(groups) - len(supervised),
        num_candidates=len(candidates),
    )
