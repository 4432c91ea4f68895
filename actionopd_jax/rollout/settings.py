"""What a state group is made of: the numbers of the method, as the rollout needs them."""

import dataclasses
from typing import Literal, get_args

from actionopd_jax.errors import ConfigError
from actionopd_jax.learning.rewards import RewardKind
from actionopd_jax.records import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupRules:
    """How a state group is sampled, rewarded and committed (paper, sections 2.2 and 2.3).

    Attributes:
        num_candidates: N student responses at a state.
        num_teacher_samples: K, the nominal size of the teacher multiset.
        frequency_bonus: lambda; 0 gives the Binary Reward ablation.
        reward: what trains. `agreement`: the paper's reward. `validity`: +1 valid, -1 invalid, while the
            agreement reward still selects what is executed. Two controls without signal commit a uniform choice
            among the valid candidates: `constant`, the same for everything, never updates; `shuffled`, the
            group's agreement rewards in random order, makes updates of the usual size that say nothing.
        commit: `best` of the agreement reward, or `uniform` over all N, invalid ones included (Random Commit).
        max_decisions: decisions of one trajectory.
        sampling: decoding settings of the student.
    """

    num_candidates: int
    num_teacher_samples: int
    frequency_bonus: float
    reward: RewardKind
    commit: Literal["best", "uniform"]
    max_decisions: int
    sampling: Sampling

    def __post_init__(self) -> None:
        if self.num_candidates < 1 or self.num_teacher_samples < 1 or self.max_decisions < 1:
            raise ConfigError("num_candidates, num_teacher_samples and max_decisions must be at least 1")
        if self.frequency_bonus < 0:
            raise ConfigError(f"frequency_bonus must not be negative, got {self.frequency_bonus}")
        if self.reward not in get_args(RewardKind):
            raise ConfigError(f"reward must be one of {', '.join(get_args(RewardKind))}, got {self.reward!r}")
        if self.commit not in {"best", "uniform"}:
            raise ConfigError(f"commit must be best or uniform, got {self.commit!r}")
