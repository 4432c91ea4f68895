"""ActionOPD: reward semantic agreement with the teacher's actions at the student's own states.

The paper's Algorithm 1, seen from the update:

    lines  5-13   the rollout leaves complete state groups, each with its N rewards
    line   15     exclude groups without supervision or with equal rewards
    line   16     centre the rewards of each group, whiten over the batch
    line   17     broadcast every advantage to the generated tokens of its response

The ablations (Validity Reward, Binary Reward, Random Commit) differ in how groups are rewarded and
committed, which is settled while collecting; from here on they are the same method.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from actionopd_jax.learning.advantages import compute_advantages
from actionopd_jax.learning.rewards import summarise
from actionopd_jax.methods.base import Collected, Figures
from actionopd_jax.records import EndReason, Example, Finish, StateGroup, Trajectory
from actionopd_jax.rollout.collector import Collector
from actionopd_jax.rollout.settings import GroupRules
from actionopd_jax.rollout.trajectory import TaskStart


@dataclasses.dataclass(frozen=True)
class ActionOPD:
    """Implements `Method`: state groups from the rollout, advantages for the surrogate."""

    collector: Collector
    epsilon: float
    objective: Literal["surrogate", "likelihood"] = "surrogate"

    @property
    def temperature(self) -> float:
        return self.collector.rules.sampling.temperature

    async def collect(self, starts: Sequence[TaskStart], step: int, policy_version: int) -> Collected:
        trajectories = await self.collector.collect(starts, step, policy_version)
        return Collected(*examples(trajectories, self.collector.rules, self.epsilon))


def examples(trajectories: Sequence[Trajectory], rules: GroupRules, epsilon: float) -> tuple[list[Example], Figures]:
    """Weighted token sequences of a step's trajectories.

    Every generated token of a candidate (reasoning, call, message, end token) carries the candidate's
    advantage `(r - mean of its group) / (sigma + epsilon)`, sigma over all kept groups of the step.

    Args:
        trajectories: everything collected in the step.
        rules: the rules under which it was collected.
        epsilon: added to sigma.

    Returns:
        The examples of the kept groups (none when no group carries signal: the update is then skipped), and
        the step's figures.
    """
    named = [(trajectory_name(trajectory), group) for trajectory in trajectories for group in trajectory.groups]
    advantages = compute_advantages([_rewards(group) for _, group in named], epsilon)
    weighted = [
        example
        for index, values in zip(advantages.kept, advantages.values, strict=True)
        for example in _weigh(*named[index], values)
    ]
    groups = [group for _, group in named]
    figures = _reward_figures(groups, rules) | _group_figures(groups, len(advantages.kept), advantages.sigma)
    return weighted, figures | _response_figures(groups) | _trajectory_figures(trajectories)


def trajectory_name(trajectory: Trajectory) -> str:
    """Identifies a task start within a run."""
    return f"{trajectory.step}/{trajectory.start}/{trajectory.task.key}"


def _rewards(group: StateGroup) -> np.ndarray | None:
    rewards = [candidate.reward for candidate in group.candidates if candidate.reward is not None]
    return np.array(rewards, np.float64) if group.supervised else None


def _weigh(trajectory: str, group: StateGroup, values: np.ndarray) -> Iterator[Example]:
    prompt_ids = np.array(group.prompt_ids, np.int32)
    for candidate, advantage in zip(group.candidates, values, strict=True):
        yield Example(
            prompt_ids=prompt_ids,
            response_ids=np.array(candidate.ids, np.int32),
            weights=np.full(len(candidate.ids), advantage, np.float32),
            group=f"{trajectory}/{group.decision}",
            trajectory=trajectory,
            behaviour_logprobs=np.array(candidate.behaviour_logprobs, np.float32),
        )


def _reward_figures(groups: Sequence[StateGroup], rules: GroupRules) -> Figures:
    """C, U, V and the mean reward, with the identity that ties them (paper, section 2.2)."""
    summary = summarise(groups, num_teacher_samples=rules.num_teacher_samples, frequency_bonus=rules.frequency_bonus)
    if summary.num_candidates == 0:
        return {}
    figures = {
        "match_count": summary.coverage,
        "match_rate": summary.any_match,
        "invalid_rate": summary.invalid,
        "reward_mean": summary.mean_reward,
    }
    if rules.reward == "agreement":
        figures |= {"alpha": summary.alpha, "reward_residual": summary.residual}
    return figures


def _group_figures(groups: Sequence[StateGroup], kept: int, sigma: float) -> Figures:
    supervised = sum(group.supervised for group in groups)
    return {
        "groups": len(groups),
        "groups_kept": kept,
        "groups_equal": supervised - kept,
        "groups_unsupervised": len(groups) - supervised,
        "advantage_sigma": sigma,
    }


def _response_figures(groups: Sequence[StateGroup]) -> Figures:
    candidates = list(itertools.chain.from_iterable(group.candidates for group in groups))
    if not candidates:
        return {}
    lengths = [len(candidate.ids) for candidate in candidates]
    return {
        "response_tokens_mean": float(np.mean(lengths)),
        "response_tokens_max": max(lengths),
        "responses_truncated": sum(candidate.finish is Finish.LENGTH for candidate in candidates),
    }


def _trajectory_figures(trajectories: Sequence[Trajectory]) -> Figures:
    figures: Figures = {
        "trajectories": len(trajectories),
        "decisions": sum(len(trajectory.groups) for trajectory in trajectories),
        "environment_steps": sum(trajectory.environment_steps for trajectory in trajectories),
    }
    for reason in EndReason:
        figures[f"end_{reason.value}"] = sum(trajectory.end is reason for trajectory in trajectories)
    scores = [trajectory.score for trajectory in trajectories if trajectory.score is not None]
    if scores:
        figures["success_rate"] = sum(score.success for score in scores) / len(scores)
        figures["score_mean"] = sum(score.partial for score in scores) / len(scores)
    return figures
