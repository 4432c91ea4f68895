"""One task start: state groups along one trajectory (paper, Algorithm 1, lines 5 to 13)."""

import dataclasses
import time

from actionopd_jax.chat.prompt import Prompt
from actionopd_jax.records import End, EndReason, StateGroup, Task, Trajectory
from actionopd_jax.rollout.group import GroupName, Source, collect_group
from actionopd_jax.rollout.interaction import Chosen, interact
from actionopd_jax.rollout.settings import GroupRules
from actionopd_jax.rollout.student import Student
from actionopd_jax.rollout.workers import EnvironmentWorker


@dataclasses.dataclass(frozen=True)
class TaskStart:
    """One task start of a step: `start` is its position within the step."""

    start: int
    task: Task
    source: Source


async def collect_trajectory(
    begin: TaskStart,
    *,
    run_seed: int,
    step: int,
    policy_version: int,
    rules: GroupRules,
    student: Student,
    environment_timeout_s: float,
) -> Trajectory:
    """Collects the groups of one task start until something ends it.

    Raises:
        ServiceError: teacher, matcher or sampler failed; nothing of this task start is kept.
    """
    began = time.monotonic()
    groups: list[StateGroup] = []

    async def decide(environment: EnvironmentWorker, prompt: Prompt, decision: int) -> Chosen | End:
        name = GroupName(run_seed, step, begin.task, begin.start, decision, policy_version)
        collected = await collect_group(prompt, name, rules, student, begin.source, environment.evidence)
        if collected is None:
            return End(EndReason.NO_TEACHER, f"no valid teacher sample at decision {decision}")
        groups.append(collected.group)
        return collected.chosen or End(EndReason.INVALID_ACTION, f"nothing to execute at decision {decision}")

    outcome = await interact(
        begin.source.suite, begin.task, student.prompts, rules.max_decisions, environment_timeout_s, decide
    )
    return Trajectory(
        step=step,
        start=begin.start,
        task=begin.task,
        groups=tuple(groups),
        end=outcome.end,
        end_detail=outcome.detail,
        score=outcome.score,
        environment_steps=outcome.environment_steps,
        wall_s=time.monotonic() - began,
    )
