import asyncio
import threading

import pytest
from rollout_doubles import INVALID, CounterSuite, Prompts, ScriptedTeacher, add, rules, say, source, student, task

from actionopd_jax.errors import ServiceError
from actionopd_jax.records import EndReason
from actionopd_jax.rollout.group import Source
from actionopd_jax.rollout.trajectory import TaskStart, collect_trajectory


@pytest.fixture
def gate():
    event = threading.Event()
    yield event
    event.set()


def collect(learner, origin, timeout_s=60.0, policy_version=0, start=0, **changes):
    return asyncio.run(
        collect_trajectory(
            TaskStart(start, task(), origin),
            run_seed=1,
            step=2,
            policy_version=policy_version,
            rules=rules(**changes),
            student=learner,
            environment_timeout_s=timeout_s,
        )
    )


def crash():
    raise RuntimeError("table is gone")


def test_trajectory_done_records_every_state_and_the_score():
    prompts = Prompts()
    origin = source([add(1)], suite=CounterSuite(target=3))
    found = collect(student([1, 5, 20, INVALID], prompts=prompts), origin)
    assert (found.step, found.start, found.task) == (2, 0, task())
    assert (found.end, found.end_detail) == (EndReason.DONE, "reached")
    assert found.score.success
    assert found.environment_steps == 3
    assert [group.decision for group in found.groups] == [0, 1, 2]
    assert [group.committed for group in found.groups] == [0, 0, 0]
    assert all(len(group.candidates) == 4 for group in found.groups)
    # The history grows by the committed turn and its result; nothing of the other candidates enters.
    roles = [[message.role for message in state.messages] for state in prompts.states]
    assert roles[0] == ["system", "user"]
    assert roles[2] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert prompts.states[2].messages[2].tool_calls == (add(1),)
    assert prompts.states[2].messages[5].content == "2"
    assert [group.state_key for group in found.groups] == [state.key for state in prompts.states]
    assert found.groups[1].prompt_ids == (4, 5, 4, 0, 1)


def test_trajectory_teacher_sees_each_state_that_the_student_sees():
    prompts = Prompts()
    teacher = ScriptedTeacher([add(1)])
    origin = source(suite=CounterSuite(target=2))
    collect(student([1] * 4, prompts=prompts), Source(origin.suite, teacher, origin.matcher))
    assert teacher.states == prompts.states


def test_trajectory_decision_limit_scores_what_was_reached():
    found = collect(student([1] * 4), source([add(1)], suite=CounterSuite(target=9)), max_decisions=3)
    assert found.end is EndReason.DECISION_LIMIT
    assert (len(found.groups), found.environment_steps) == (3, 3)
    assert not found.score.success
    assert found.score.partial == pytest.approx(3 / 9)


def test_trajectory_ending_on_the_last_decision_is_done():
    found = collect(student([1] * 4), source([add(1)], suite=CounterSuite(target=3)), max_decisions=3)
    assert found.end is EndReason.DONE


def test_trajectory_context_overflow_ends_with_what_was_collected():
    learner = student([1] * 4, prompts=Prompts(budget=4))
    found = collect(learner, source([add(1)], suite=CounterSuite(target=9)))
    assert found.end is EndReason.CONTEXT
    assert "has 6 tokens" in found.end_detail
    assert len(found.groups) == 2
    assert found.score.details == {"total": 2}


def test_trajectory_invalid_best_candidate_ends_and_keeps_the_group():
    origin = source([add(1)])
    found = collect(student([INVALID] * 4), origin)
    assert found.end is EndReason.INVALID_ACTION
    assert (len(found.groups), found.environment_steps) == (1, 0)
    assert found.groups[0].committed is None
    assert [candidate.reward for candidate in found.groups[0].candidates] == [-1.0] * 4
    assert not found.score.success
    assert origin.suite.open == 0


def test_trajectory_without_teacher_sample_ends_without_a_group():
    found = collect(student([1] * 4), source(lambda state: [add(1)] if len(state.messages) == 2 else []))
    assert found.end is EndReason.NO_TEACHER
    assert (len(found.groups), found.environment_steps) == (1, 1)
    assert found.score is not None


def test_trajectory_crashed_environment_ends_its_own_episode():
    found = collect(student([1] * 4), source(suite=CounterSuite(faults={"step": crash})))
    assert found.end is EndReason.ENVIRONMENT_FAILURE
    assert "table is gone" in found.end_detail
    assert found.score is None
    assert (len(found.groups), found.environment_steps) == (1, 0)


@pytest.mark.parametrize(("method", "groups"), [("make", 0), ("reset", 0), ("step", 1), ("evidence", 0)])
def test_trajectory_hung_environment_ends_its_own_episode(gate, method, groups):
    found = collect(student([1] * 4), source(suite=CounterSuite(faults={method: gate.wait})), timeout_s=1.0)
    assert found.end is EndReason.ENVIRONMENT_FAILURE
    assert "did not answer within 1 s" in found.end_detail
    assert found.score is None
    assert len(found.groups) == groups


def test_trajectory_failing_score_is_an_environment_failure():
    found = collect(student([3] * 4), source([add(3)], suite=CounterSuite(target=3, faults={"score": crash})))
    assert (found.end, found.score) == (EndReason.ENVIRONMENT_FAILURE, None)
    assert len(found.groups) == 1


def test_trajectory_service_error_propagates_and_closes_the_environment():
    class Down(ScriptedTeacher):
        async def sample(self, state, start, k):
            raise ServiceError("teacher is down")

    origin = source()
    with pytest.raises(ServiceError, match="teacher is down"):
        collect(student([1] * 4), Source(origin.suite, Down([]), origin.matcher))
    assert origin.suite.made[0].closed.wait(30)


def test_trajectory_messages_enter_the_history_as_turns():
    prompts = Prompts()
    collect(student([20] * 4, prompts=prompts), source([say(20)], suite=CounterSuite(target=9)), max_decisions=2)
    assert prompts.states[1].messages[2].content == "message 20"


def test_trajectory_same_names_give_the_same_records():
    def script(ids, n, seed):
        return [1 + (seed >> (4 * i)) % 3 for i in range(n)]

    def run(start):
        found = collect(student(script), source([add(1), add(2)], suite=CounterSuite(target=9)), start=start)
        return found.groups, found.end, found.score

    assert run(0) == run(0)
    assert run(0) != run(1)
