"""KD: imitate successful teacher trajectories token by token (paper, B.4), also the warm start.

Every token that the teacher generated (reasoning, call, message, end token) is a target of weight 1;
prompts and observations are context. Divided by the number of active tokens, the update is the mean
negative log-likelihood.
"""

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from actionopd_jax.chat.prompt import Prompt
from actionopd_jax.chat.tokenizer import ChatTokenizer
from actionopd_jax.methods.base import Collected
from actionopd_jax.records import ChatMessage, End, EndReason, Example, ToolCall
from actionopd_jax.rollout.concurrency import together
from actionopd_jax.rollout.interaction import Chosen, interact
from actionopd_jax.rollout.student import PromptSource
from actionopd_jax.rollout.trajectory import TaskStart
from actionopd_jax.rollout.workers import EnvironmentWorker


@dataclasses.dataclass(frozen=True)
class TeacherTurn:
    """One assistant turn of a teacher trajectory, in the student's tokens.

    Attributes:
        prompt_ids: the state, through the student's chat template.
        reply_ids: what the teacher generated there, end token included.
        trajectory: identifies the trajectory; only successful ones belong here.
        decision: position of the turn in it.
    """

    prompt_ids: Sequence[int]
    reply_ids: Sequence[int]
    trajectory: str
    decision: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class KD:
    """Implements `Method`: the teacher plays each task start, the student imitates the successful plays.

    The teacher answers from the same retained public context as the student would see.
    """

    prompts: PromptSource
    tokenizer: ChatTokenizer
    thinking: bool
    max_decisions: int
    concurrent_tasks: int
    environment_timeout_s: float
    objective: Literal["surrogate", "likelihood"] = "likelihood"
    temperature: float = 1.0

    async def collect(self, starts: Sequence[TaskStart], step: int, policy_version: int) -> Collected:
        slots = asyncio.Semaphore(self.concurrent_tasks)
        played = await together([self._play(begin, step, slots) for begin in starts])
        turns = [turn for trajectory in played for turn in trajectory]
        successes = sum(bool(trajectory) for trajectory in played)
        figures = {"trajectories": len(played), "teacher_success_rate": successes / len(played), "teacher_turns": len(turns)}
        return Collected(examples(turns), figures)

    async def _play(self, begin: TaskStart, step: int, slots: asyncio.Semaphore) -> list[TeacherTurn]:
        """The teacher's turns at one task start; none unless it succeeds."""
        turns: list[TeacherTurn] = []

        async def decide(environment: EnvironmentWorker, prompt: Prompt, decision: int) -> Chosen | End:
            samples = await begin.source.teacher.sample(prompt.state, begin.task, 1)
            if not samples:
                return End(EndReason.NO_TEACHER)
            action, reply = samples[0].action, samples[0].reply
            calls = (action,) if isinstance(action, ToolCall) else ()
            ids = self.tokenizer.encode_response(reply.reasoning, reply.content, calls, self.thinking)
            name = f"{step}/{begin.start}/{begin.task.key}"
            turns.append(TeacherTurn(prompt_ids=prompt.ids, reply_ids=ids, trajectory=name, decision=decision))
            return Chosen(action, ChatMessage("assistant", reply.content, reply.reasoning, calls))

        async with slots:
            suite, timeout_s = begin.source.suite, self.environment_timeout_s
            outcome = await interact(suite, begin.task, self.prompts, self.max_decisions, timeout_s, decide)
        return turns if outcome.score is not None and outcome.score.success else []


def examples(turns: Iterable[TeacherTurn]) -> list[Example]:
    """Likelihood targets: weight 1 for each token of each reply, nothing else.

    Raises:
        ValueError: an empty prompt or reply; names the turn.
    """
    return [
        Example(
            prompt_ids=np.array(turn.prompt_ids, np.int32),
            response_ids=np.array(turn.reply_ids, np.int32),
            weights=np.ones(len(turn.reply_ids), np.float32),
            group=f"{turn.trajectory}/{turn.decision}",
            trajectory=turn.trajectory,
        )
        for turn in turns
    ]
