"""The expert played through tasks: conversations for tokenizer training and the warm start."""

from collections.abc import Iterator
from typing import NamedTuple

from actionopd_jax.chat.actions import parse_reply
from actionopd_jax.environments.service_desk.environment import ServiceDesk, ServiceDeskSuite
from actionopd_jax.environments.service_desk.expert import Expert, ExpertSettings
from actionopd_jax.records import ChatMessage, ChatReply, End, Invalid, Score, State, Task, ToolCall, ValidAction

MAX_DECISIONS = 20


class Decision(NamedTuple):
    """What the expert saw, what it answered, and the action that the answer is."""

    state: State
    reply: ChatReply
    action: ValidAction


class Transcript(NamedTuple):
    """One played task."""

    task: Task
    decisions: tuple[Decision, ...]
    score: Score


def transcripts(
    suite: ServiceDeskSuite, split: str, count: int, seed: int, settings: ExpertSettings | None = None
) -> Iterator[Transcript]:
    """Plays the expert through the first `count` tasks of a split (again from the first when there are fewer).

    A reply that is no valid action is drawn again, as a teacher's is; it appears in no transcript.
    """
    tasks = suite.tasks(split)
    for number in range(count):
        task = tasks[number % len(tasks)]
        expert = Expert(seed + number // len(tasks), settings)
        yield play(ServiceDesk(suite.scenario(task)), task, expert)


def play(environment: ServiceDesk, task: Task, expert: Expert) -> Transcript:
    """One episode with the expert as the agent."""
    observation = environment.reset()
    history = observation.messages
    decisions: list[Decision] = []
    while len(decisions) < MAX_DECISIONS:
        state = State(task.environment, history, observation.tools)
        reply, action = _valid(expert, state)
        decisions.append(Decision(state, reply, action))
        following = environment.step(action)
        if isinstance(following, End):
            break
        calls = (action,) if isinstance(action, ToolCall) else ()
        turn = ChatMessage("assistant", reply.content, reasoning=reply.reasoning, tool_calls=calls)
        history = (*history, turn, *following.messages)
        observation = following
    score = environment.score()
    environment.close()
    return Transcript(task, tuple(decisions), score)


def _valid(expert: Expert, state: State) -> tuple[ChatReply, ValidAction]:
    attempt = 0
    while True:
        reply = expert.reply(state, (0, attempt))
        action = parse_reply(reply, state)
        if not isinstance(action, Invalid):
            return reply, action
        attempt += 1
