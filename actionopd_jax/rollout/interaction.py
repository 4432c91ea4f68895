"""One episode seen from outside: history, prompt, decision, execution, and why it ended.

Collecting and evaluating differ only in how a decision is made; everything else is here.
"""

import dataclasses
from collections.abc import Awaitable, Callable

from actionopd_jax.chat.actions import Response
from actionopd_jax.chat.prompt import ContextOverflow, Prompt
from actionopd_jax.errors import EnvironmentFailure
from actionopd_jax.protocols import Suite
from actionopd_jax.records import (
    ChatMessage,
    End,
    EndReason,
    Invalid,
    Observation,
    Score,
    State,
    Task,
    ValidAction,
)
from actionopd_jax.rollout.student import PromptSource
from actionopd_jax.rollout.workers import EnvironmentWorker


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A decision to act: the action for the environment, and the assistant turn for the history."""

    action: ValidAction
    message: ChatMessage

    @classmethod
    def of(cls, response: Response) -> "Chosen | None":
        """What executing a response means; None when it is no action."""
        if isinstance(response.action, Invalid) or response.message is None:
            return None
        return cls(response.action, response.message)


Decide = Callable[[EnvironmentWorker, Prompt, int], Awaitable[Chosen | End]]
"""Makes decision number `int` at a prompt, or ends the episode."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an episode went. `score` is None only when the environment failed."""

    end: EndReason
    detail: str
    score: Score | None
    environment_steps: int


class History:
    """The full conversation of one episode and what the environment allows now; nothing is ever dropped here."""

    def __init__(self, environment: str) -> None:
        self._environment = environment
        self._messages: list[ChatMessage] = []
        self._latest: Observation | None = None

    def observe(self, observation: Observation) -> None:
        self._messages.extend(observation.messages)
        self._latest = observation

    def reply(self, message: ChatMessage) -> None:
        self._messages.append(message)

    def state(self) -> State:
        """The state with all history; the prompt builder retains what fits."""
        if self._latest is None:
            raise ValueError("a history has no state before its first observation")
        return State(
            environment=self._environment,
            messages=tuple(self._messages),
            tools=self._latest.tools,
            allow_tool_calls=self._latest.allow_tool_calls,
            allow_messages=self._latest.allow_messages,
            rules=self._latest.rules,
        )


async def interact(
    suite: Suite, task: Task, prompts: PromptSource, max_decisions: int, timeout_s: float, decide: Decide
) -> Outcome:
    """Plays one task start until something ends it, then scores it.

    An environment that fails ends its own episode, without a score. Every other error (a service, the
    configuration) propagates.
    """
    episode = _Episode(suite.name, prompts, max_decisions, decide)
    async with EnvironmentWorker(suite, task, timeout_s) as environment:
        try:
            end = await episode.run(environment)
            score = await environment.score()
        except EnvironmentFailure as failure:
            return Outcome(EndReason.ENVIRONMENT_FAILURE, str(failure), None, episode.steps)
        return Outcome(end.reason, end.detail, score, episode.steps)


class _Episode:
    def __init__(self, environment: str, prompts: PromptSource, max_decisions: int, decide: Decide) -> None:
        self._history = History(environment)
        self._prompts = prompts
        self._max_decisions = max_decisions
        self._decide = decide
        self.steps = 0

    async def run(self, environment: EnvironmentWorker) -> End:
        self._history.observe(await environment.reset())
        for decision in range(self._max_decisions):
            try:
                prompt = self._prompts.build(self._history.state())
            except ContextOverflow as overflow:
                return End(EndReason.CONTEXT, str(overflow))
            chosen = await self._decide(environment, prompt, decision)
            if isinstance(chosen, End):
                return chosen
            self._history.reply(chosen.message)
            answer = await environment.step(chosen.action)
            self.steps += 1
            if isinstance(answer, End):
                return answer
            self._history.observe(answer)
        return End(EndReason.DECISION_LIMIT, f"{self._max_decisions} decisions")
