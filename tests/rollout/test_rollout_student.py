"""The rollout on the real chat layer: real prompts, real ids, real parsing, real matching."""

import asyncio

import pytest
from rollout_doubles import SAMPLING, CounterSuite, ScriptedTeacher, add, rules, task

from actionopd_jax.chat.prompt import PromptBuilder
from actionopd_jax.errors import ServiceError
from actionopd_jax.records import ChatMessage, EndReason, Finish, Invalid, InvalidReason, Sample, State
from actionopd_jax.rollout.group import Source
from actionopd_jax.rollout.student import Student
from actionopd_jax.rollout.trajectory import TaskStart, collect_trajectory
from actionopd_jax.services.matcher import SemanticMatcher


class Writing:
    """Writes the same texts at every state, the last one without its end token."""

    def __init__(self, tokenizer):
        self.answers = [
            tokenizer.encode_response("", "", (add(2),), False),
            tokenizer.encode_response("", "One more.", (add(1),), False),
            tokenizer.encode_response("", "I am done.", (), False),
            tokenizer.encode_response("", "", (add(1),), False)[:-1],
        ]

    async def generate(self, prompt_ids, sampling, n, seed):
        finishes = [Finish.STOP] * 3 + [Finish.LENGTH]
        return [Sample(ids, (-1.0,) * len(ids), finish, 0) for ids, finish in zip(self.answers, finishes, strict=True)]


def collect(tokenizer, max_prompt_tokens):
    sampler = Writing(tokenizer)
    learner = Student(sampler, PromptBuilder(tokenizer, max_prompt_tokens, False), tokenizer, False)
    origin = Source(CounterSuite(target=3), ScriptedTeacher([add(1), add(1), add(2)]), SemanticMatcher(None, False, None))
    found = asyncio.run(
        collect_trajectory(
            TaskStart(0, task(), origin),
            run_seed=0,
            step=0,
            policy_version=0,
            rules=rules(),
            student=learner,
            environment_timeout_s=60,
        )
    )
    return found, sampler


def test_trajectory_on_real_chat_ids_is_verbatim_and_prompts_extend(small_tokenizer):
    found, sampler = collect(small_tokenizer, 4000)
    assert found.end is EndReason.DONE
    assert found.score.success
    assert [len(group.candidates) for group in found.groups] == [4, 4, 4]
    for group in found.groups:
        assert [candidate.ids for candidate in group.candidates] == sampler.answers
        assert [candidate.reward for candidate in group.candidates] == [1.0, 1.25, 0.0, -1.0]
        assert group.candidates[1].action == add(1)
        assert group.candidates[3].action == Invalid(InvalidReason.LENGTH, group.candidates[3].action.detail)
        assert group.committed == 1
    # Within a tool chain each prompt starts with the one before it and the committed response.
    for before, after in zip(found.groups, found.groups[1:], strict=False):
        whole = before.prompt_ids + before.candidates[1].ids
        assert after.prompt_ids[: len(whole)] == whole


def test_trajectory_on_a_small_context_ends_for_the_context(small_tokenizer):
    found, _ = collect(small_tokenizer, 20)
    assert found.end is EndReason.CONTEXT
    assert found.groups == ()


def test_student_respond_refuses_a_stale_policy(small_tokenizer):
    prompts = PromptBuilder(small_tokenizer, 4000, False)
    learner = Student(Writing(small_tokenizer), prompts, small_tokenizer, False)
    prompt = prompts.build(State("counter", (ChatMessage("user", "go"),), ()))
    with pytest.raises(ServiceError, match="publish the weights"):
        asyncio.run(learner.respond(prompt, SAMPLING, num=4, seed=0, policy_version=1))
