"""One state group: teacher multiset, student candidates, verdicts, rewards, and the commitment.

(paper, sections 2.2 and 2.3 and A.3)
"""

import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from actionopd_jax import seeds
from actionopd_jax.chat.prompt import Prompt
from actionopd_jax.errors import ServiceError
from actionopd_jax.learning.rewards import RewardKind, reward
from actionopd_jax.protocols import Matcher, Suite, Teacher
from actionopd_jax.records import (
    Action,
    Candidate,
    Invalid,
    Match,
    Sample,
    State,
    StateGroup,
    Task,
    TeacherSample,
    ToolCall,
    Unavailable,
    Verdict,
)
from actionopd_jax.rollout.concurrency import together
from actionopd_jax.rollout.interaction import Chosen
from actionopd_jax.rollout.settings import GroupRules
from actionopd_jax.rollout.student import Student

Evidence = Callable[[str], Awaitable[str | None]]
"""Looks up the implementation source of a tool."""


@dataclasses.dataclass(frozen=True)
class Source:
    """A suite of tasks with the teacher and the matcher that supervise its states."""

    suite: Suite
    teacher: Teacher
    matcher: Matcher


@dataclasses.dataclass(frozen=True)
class GroupName:
    """Where a group stands in the run; all its randomness derives from this."""

    run_seed: int
    step: int
    task: Task
    start: int
    decision: int
    policy_version: int

    @property
    def path(self) -> tuple[int | str, ...]:
        return (self.run_seed, self.step, self.task.key, self.start, self.decision)


@dataclasses.dataclass(frozen=True)
class CollectedGroup:
    """A complete group, and what to execute (None: the chosen candidate is no action, or none is valid)."""

    group: StateGroup
    chosen: Chosen | None


async def collect_group(
    prompt: Prompt, name: GroupName, rules: GroupRules, student: Student, source: Source, evidence: Evidence
) -> CollectedGroup | None:
    """Collects the group of one state; None when the teacher has no valid sample there.

    The teacher multiset is fixed before the student is sampled. One unavailable verdict leaves the whole
    group without rewards: it is kept, and the episode advances by a uniform choice among its valid candidates.

    Raises:
        ServiceError: teacher, sampler or matcher failed or broke its contract, or the sampler answered with
            another policy version than the one being collected.
    """
    teacher = tuple(await source.teacher.sample(prompt.state, name.task, rules.num_teacher_samples))
    if len(teacher) > rules.num_teacher_samples:
        raise ServiceError(f"the teacher gave {len(teacher)} samples where {rules.num_teacher_samples} were asked for")
    if not teacher:
        return None
    answers = await student.respond(
        prompt,
        rules.sampling,
        num=rules.num_candidates,
        seed=seeds.derive(*name.path),
        policy_version=name.policy_version,
    )
    actions = [response.action for _, response in answers]
    verdicts = await _judge(prompt.state, actions, teacher, source.matcher, evidence)
    counts = [sum(isinstance(verdict, Match) for verdict in row) for row in verdicts]
    supervised = not any(isinstance(verdict, Unavailable) for row in verdicts for verdict in row)
    rewards = _rewards(actions, counts, name, rules) if supervised else [None] * len(actions)
    committed = _commit(actions, counts, supervised, name, rules)
    samples = [sample for sample, _ in answers]
    group = StateGroup(
        decision=name.decision,
        state_key=prompt.state.key,
        prompt_ids=tuple(prompt.ids),
        teacher=teacher,
        candidates=tuple(map(_candidate, samples, actions, verdicts, counts, rewards)),
        committed=committed,
        policy_version=name.policy_version,
    )
    return CollectedGroup(group, None if committed is None else Chosen.of(answers[committed][1]))


async def _judge(
    state: State, actions: Sequence[Action], teacher: Sequence[TeacherSample], matcher: Matcher, evidence: Evidence
) -> list[tuple[Verdict, ...]]:
    """Verdicts of all (candidate, teacher sample) pairs, asked at once: `[N][retained]`."""
    sources = {tool: await evidence(tool) for tool in _shared_tools(actions, teacher)}
    wanted = [sample.action for sample in teacher]
    answers = await together(
        matcher.match(state, action, other, sources.get(other.name) if isinstance(other, ToolCall) else None)
        for action in actions
        for other in wanted
    )
    width = len(wanted)
    return [tuple(answers[width * i : width * (i + 1)]) for i in range(len(actions))]


def _shared_tools(actions: Sequence[Action], teacher: Sequence[TeacherSample]) -> list[str]:
    called = {action.name for action in actions if isinstance(action, ToolCall)}
    wanted = {sample.action.name for sample in teacher if isinstance(sample.action, ToolCall)}
    return sorted(called & wanted)


def _rewards(actions: Sequence[Action], counts: Sequence[int], name: GroupName, rules: GroupRules) -> list[float]:
    values = [_reward(rules.reward, action, count, rules) for action, count in zip(actions, counts, strict=True)]
    if rules.reward == "shuffled":
        seeds.python_random(*name.path, "shuffle").shuffle(values)
    return values


def _reward(kind: RewardKind, action: Action, count: int, rules: GroupRules) -> float:
    return reward(
        kind,
        count,
        not isinstance(action, Invalid),
        num_teacher_samples=rules.num_teacher_samples,
        frequency_bonus=rules.frequency_bonus,
    )


def _commit(
    actions: Sequence[Action], counts: Sequence[int], supervised: bool, name: GroupName, rules: GroupRules
) -> int | None:
    """Index of the candidate to execute, ties broken by the group's name; None when it is no action."""
    valid = [not isinstance(action, Invalid) for action in actions]
    everyone = range(len(actions))
    if not supervised or (rules.reward in {"constant", "shuffled"} and rules.commit == "best"):
        pool = [i for i in everyone if valid[i]]
    elif rules.commit == "uniform":
        pool = list(everyone)
    else:
        # Also where another reward trains, agreement selects what is executed (paper, section 3.4).
        values = [_reward("agreement", action, count, rules) for action, count in zip(actions, counts, strict=True)]
        pool = [i for i in everyone if values[i] == max(values)]
    if not pool:
        return None
    index = seeds.python_random(*name.path, "commit").choice(pool)
    return index if valid[index] else None


def _candidate(sample: Sample, action: Action, verdicts: tuple[Verdict, ...], count: int, earned: float | None) -> Candidate:
    return Candidate(
        ids=tuple(sample.ids),
        behaviour_logprobs=tuple(sample.logprobs),
        finish=sample.finish,
        action=action,
        verdicts=verdicts,
        match_count=count,
        reward=earned,
    )
