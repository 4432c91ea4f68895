"""The expert played through tasks: conversations for tokenizer training and the warm start."""

import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from actionopd_jax.environments.service_desk import world
from actionopd_jax.environments.service_desk.environment import ServiceDesk
from actionopd_jax.environments.service_desk.expert import Expert, ExpertSettings
from actionopd_jax.environments.service_desk.tools import TOOLS
from actionopd_jax.records import (
    ChatMessage,
    ChatReply,
    End,
    Message,
    Score,
    State,
    Task,
    ToolCall,
)

MAX_DECISIONS = 20


class Decision(NamedTuple):
    """What the expert saw and what it answered."""

    state: State
    reply: ChatReply


class Transcript(NamedTuple):
    """One played task."""

    task: Task
    decisions: tuple[Decision, ...]
    score: Score


class _Suite(Protocol):
    def tasks(self, split: str) -> Sequence[Task]: ...
    def scenario(self, task: Task) -> world.Scenario: ...


def transcripts(
    suite: _Suite, split: str, count: int, seed: int, settings: ExpertSettings | None = None
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
        decisions.append(Decision(state, reply))
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


def _valid(expert: Expert, state: State) -> tuple[ChatReply, ToolCall | Message]:
    attempt = 0
    while True:
        reply = expert.reply(state, (0, attempt))
        if not reply.tool_calls:
            return reply, Message(reply.content)
        action = _parse(reply)
        if action is not None:
            return reply, action
        attempt += 1


def _parse(reply: ChatReply) -> ToolCall | None:
    call = reply.tool_calls[0]
    if call.name not in TOOLS:
        return None
    try:
        arguments = json.loads(call.arguments)
    except json.JSONDecodeError:
        return None
    required = TOOLS[call.name].spec.parameters["required"]
    return ToolCall(call.name, arguments) if all(name in arguments for name in required) else None
