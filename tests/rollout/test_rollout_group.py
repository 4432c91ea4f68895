import asyncio
import collections

import pytest
from rollout_doubles import (
    INVALID,
    Prompts,
    ScriptedMatcher,
    ScriptedTeacher,
    add,
    rules,
    say,
    source,
    student,
    task,
)

from actionopd_jax import seeds
from actionopd_jax.errors import ConfigError, ServiceError
from actionopd_jax.records import ChatMessage, Invalid, Sample, State, ToolSpec, Unavailable
from actionopd_jax.rollout.group import GroupName, collect_group

STATE = State("counter", (ChatMessage("user", "go"),), (ToolSpec("add", "", {"type": "object"}),))


async def no_evidence(tool):
    return None


def collect(firsts, origin=None, start=0, policy_version=0, evidence=no_evidence, learner=None, **changes):
    name = GroupName(11, 4, task(), start, 2, policy_version)
    learner = learner or student(firsts)
    prompt = Prompts().build(STATE)
    return asyncio.run(
        collect_group(prompt, name, rules(num_candidates=len(firsts), **changes), learner, origin or source(), evidence)
    )


def rewards(collected):
    return [candidate.reward for candidate in collected.group.candidates]


@pytest.mark.parametrize(
    ("teacher", "k", "bonus", "expected"),
    [
        ([add(1), add(1), add(2)], 3, 0.5, [1.25, 1.0, 0.0, -1.0]),
        ([add(1), add(1)], 3, 0.5, [1.25, 0.0, 0.0, -1.0]),  # retained 2 of 3: K stays nominal
        ([add(1)], 3, 0.5, [1.0, 0.0, 0.0, -1.0]),
        ([add(1), add(1), add(1)], 3, 0.5, [1.5, 0.0, 0.0, -1.0]),
        ([add(2)], 1, 0.5, [0.0, 1.0, 0.0, -1.0]),
        ([add(1), add(1), add(2)], 3, 0.0, [1.0, 1.0, 0.0, -1.0]),
        ([add(1), say(20)], 2, 0.7, [1.0, 0.0, 1.0, -1.0]),
    ],
)
def test_collect_group_examples_of_the_method_rewards(teacher, k, bonus, expected):
    collected = collect([1, 2, 20, INVALID], source(teacher), num_teacher_samples=k, frequency_bonus=bonus)
    assert rewards(collected) == pytest.approx(expected)
    assert collected.group.supervised


def test_collect_group_complete_record():
    collected = collect([1, 2, 5, INVALID])
    group = collected.group
    assert [candidate.match_count for candidate in group.candidates] == [2, 1, 0, 0]
    assert [len(candidate.verdicts) for candidate in group.candidates] == [3, 3, 3, 3]
    assert [candidate.ids[0] for candidate in group.candidates] == [1, 2, 5, INVALID]
    assert group.candidates[0].behaviour_logprobs == (-0.5, -0.25, 0.0)
    assert group.committed == 0
    assert collected.chosen.action == add(1)
    assert collected.chosen.message.tool_calls == (add(1),)
    assert (group.decision, group.state_key, group.policy_version) == (2, STATE.key, 0)


def test_collect_group_teacher_is_fixed_before_student_samples():
    log = []
    collect([1, 2], source(log=log), learner=student([1, 2], log=log))
    assert log == ["teacher", "student"]


def test_collect_group_one_generation_seeded_by_names():
    learner = student([1, 2, 3])
    collect([1, 2, 3], learner=learner, start=5)
    [(_, _, n, seed)] = learner.sampler.calls
    assert (n, seed) == (3, seeds.derive(11, 4, task().key, 5, 2))


def test_collect_group_no_teacher_sample_asks_no_student():
    learner = student([1])
    assert collect([1], source([]), learner=learner) is None
    assert learner.sampler.calls == []


def test_collect_group_unavailable_verdict_leaves_whole_group_unsupervised():
    matcher = ScriptedMatcher(lambda action, other: action == add(5) and other == add(2))
    commits = collections.Counter()
    for start in range(300):
        group = collect([1, 5, INVALID], source(matcher=matcher), start=start).group
        assert not group.supervised
        assert [candidate.reward for candidate in group.candidates] == [None, None, None]
        assert isinstance(group.candidates[1].verdicts[2], Unavailable)
        commits[group.committed] += 1
    assert set(commits) == {0, 1}  # the better match has no privilege, the invalid one no chance
    assert 110 < commits[0] < 190


def test_collect_group_unsupervised_without_valid_candidate_commits_nothing():
    matcher = ScriptedMatcher(lambda action, other: True)
    collected = collect([INVALID, INVALID], source(matcher=matcher))
    assert collected.group.committed is None
    assert collected.chosen is None


def test_collect_group_best_is_invalid_keeps_group_and_commits_nothing():
    collected = collect([INVALID, INVALID])
    assert rewards(collected) == [-1.0, -1.0]
    assert collected.group.committed is None
    assert collected.chosen is None
    assert all(isinstance(candidate.action, Invalid) for candidate in collected.group.candidates)


def test_collect_group_ties_are_broken_uniformly_and_reproducibly():
    firsts = [5, 1, 1, INVALID, 1]
    commits = [collect(firsts, start=start).group.committed for start in range(600)]
    assert commits == [collect(firsts, start=start).group.committed for start in range(600)]
    counts = collections.Counter(commits)
    assert set(counts) == {1, 2, 4}
    assert all(abs(count - 200) < 60 for count in counts.values())  # 5 standard deviations


def test_collect_group_validity_reward_trains_while_agreement_commits():
    for start in range(20):
        collected = collect([5, 1, INVALID], start=start, reward="validity")
        assert rewards(collected) == [1.0, 1.0, -1.0]
        assert collected.group.committed == 1


def test_collect_group_constant_reward_carries_no_signal():
    groups = [collect([5, 1, INVALID], start=start, reward="constant").group for start in range(200)]
    assert all(len({candidate.reward for candidate in group.candidates}) == 1 for group in groups)
    commits = collections.Counter(group.committed for group in groups)
    assert set(commits) == {0, 1}
    assert 65 < commits[0] < 135


def test_collect_group_shuffled_reward_permutes_the_groups_agreement_rewards():
    at_each = collections.Counter()
    commits = collections.Counter()
    for start in range(800):
        group = collect([1, 2, 5, INVALID], start=start, reward="shuffled").group
        earned = [candidate.reward for candidate in group.candidates]
        assert sorted(earned) == [-1.0, 0.0, 1.0, 1.25]  # the same rewards, so the same size of update
        assert [candidate.match_count for candidate in group.candidates] == [2, 1, 0, 0]
        at_each.update(enumerate(earned))
        commits[group.committed] += 1
    assert len(at_each) == 16
    assert all(abs(count - 200) < 61 for count in at_each.values())  # 5 standard deviations
    assert set(commits) == {0, 1, 2}  # uniform among the valid ones, whatever they earned
    assert all(abs(count - 800 / 3) < 67 for count in commits.values())


def test_collect_group_shuffled_reward_derives_from_the_groups_name():
    def shuffled(**changes):
        return [rewards(collect([1, 2, 5, INVALID], reward="shuffled", start=start, **changes)) for start in range(20)]

    assert shuffled() == shuffled()
    assert len({tuple(earned) for earned in shuffled()}) > 5


def test_collect_group_shuffled_reward_without_supervision_is_none():
    matcher = ScriptedMatcher(lambda action, other: True)
    assert rewards(collect([1, 5], source(matcher=matcher), reward="shuffled")) == [None, None]


def test_collect_group_uniform_commit_includes_invalid():
    commits = collections.Counter()
    for start in range(300):
        collected = collect([5, 1, INVALID], start=start, commit="uniform")
        assert rewards(collected) == [0.0, 1.25, -1.0]
        assert (collected.group.committed is None) == (collected.chosen is None)
        commits[collected.group.committed] += 1
    assert set(commits) == {0, 1, None}
    assert all(60 < count < 140 for count in commits.values())


def test_collect_group_evidence_only_for_tools_called_on_both_sides():
    asked = []

    async def evidence(tool):
        asked.append(tool)
        return "code"

    matcher = ScriptedMatcher()
    collect([1, 2], source([add(1), say(20)], matcher=matcher), evidence=evidence)
    assert asked == ["add"]
    assert {(other, proof) for _, other, proof in matcher.pairs if other == say(20)} == {(say(20), None)}
    assert [proof for _, other, proof in matcher.pairs if other == add(1)] == ["code", "code"]
    collect([20, 21], source([add(1)]), evidence=evidence)
    assert asked == ["add"]


def test_collect_group_other_policy_version_is_a_service_error():
    with pytest.raises(ServiceError, match="policy version 0 while version 3"):
        collect([1, 2], policy_version=3)


def test_collect_group_incomplete_or_empty_samples_are_service_errors():
    with pytest.raises(ServiceError, match="1 responses where 2"):
        collect([1, 2], learner=student([1]))

    class Empty:
        async def generate(self, prompt_ids, sampling, n, seed):
            return [Sample((), (), "stop", 0)] * n

    learner = student([1])
    object.__setattr__(learner, "sampler", Empty())
    with pytest.raises(ServiceError, match="0 ids"):
        collect([1], learner=learner)


def test_collect_group_too_many_teacher_samples_is_a_service_error():
    with pytest.raises(ServiceError, match="4 samples where 3"):
        collect([1], source([add(1)] * 4))


def test_collect_group_failing_matcher_raises_its_own_error():
    class Failing(ScriptedMatcher):
        async def match(self, *_):
            raise ServiceError("matcher is down")

    with pytest.raises(ServiceError, match="matcher is down"):
        collect([1, 2], source(matcher=Failing()))


def test_collect_group_teacher_sees_the_retained_state():
    teacher = ScriptedTeacher([add(1)])
    origin = source()
    object.__setattr__(origin, "teacher", teacher)
    collect([1], origin)
    assert teacher.states == [STATE]


@pytest.mark.parametrize(
    "changes",
    [{"num_candidates": 0}, {"num_teacher_samples": 0}, {"frequency_bonus": -0.1}, {"reward": "luck"}, {"commit": "worst"}],
)
def test_group_rules_out_of_range_are_refused(changes):
    with pytest.raises(ConfigError):
        rules(**changes)
