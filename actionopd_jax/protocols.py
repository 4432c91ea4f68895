"""The contracts between the rooms of the house; every one has a scripted in-process implementation."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import msgspec

from actionopd_jax.records import (
    Action,
    ChatReply,
    End,
    JsonObject,
    Observation,
    Sample,
    Sampling,
    Score,
    State,
    Task,
    TeacherSample,
    ToolCall,
    ToolSpec,
    ValidAction,
    Verdict,
)


class Environment(Protocol):
    """One task start. Single use; may block (the rollout runs it in a thread of its own).

    A student's mistake is never an exception: it is an observation. `EnvironmentFailure` is for the
    environment's own faults and ends this episode only.
    """

    def reset(self) -> Observation: ...
    def step(self, action: ToolCall | ValidAction) -> Observation | End: ...
    def score(self) -> Score:
        """Outcome; also valid when the episode was cut short."""
        ...

    def evidence(self, tool: str) -> str | None:
        """Implementation source of a tool, for the matcher alone."""
        ...

    def close(self) -> None:
        """Frees everything; may be called twice."""
        ...


class Suite(Protocol):
    """A family of tasks: what a config names as an environment."""

    name: str
    version: str  # package version and data digest: scores of different versions are not comparable
    promises_evidence: bool  # the matcher then needs the source of a tool to judge its arguments

    def splits(self) -> Sequence[str]: ...
    def tasks(self, split: str) -> Sequence[Task]: ...
    def make(self, task: Task) -> Environment: ...
    def scripted_teacher(self, seed: int, settings: JsonObject) -> "ChatModel":
        """The suite's own expert, reached as an API teacher is; `ConfigError` when it has none."""
        ...

    def judge(self) -> "Judge | None":
        """The suite's own matcher model, where it has one."""
        ...


class ChatRequest(msgspec.Struct, frozen=True):
    """One request to a chat model.

    `draw` tells apart independent draws at one state (teacher sample k, attempt a). `task` serves
    scripted teachers and accounting; a remote model never sees it.
    """

    state: State
    task: Task
    draw: tuple[int, int]


@runtime_checkable
class ChatModel(Protocol):
    """A model behind a chat interface: one assistant turn for one request.

    `identity` names everything that determines its answers (model, provider, prompt and protocol
    version, decoding settings); `depends_on_task` says whether the hidden task does too.
    """

    identity: str
    depends_on_task: bool

    async def complete(self, request: ChatRequest) -> ChatReply:
        """Raises `ServiceError` when no answer can be had."""
        ...


class Teacher(Protocol):
    """Samples the teacher multiset of a state: up to `k` valid actions, multiplicity kept."""

    async def sample(self, state: State, task: Task, k: int) -> Sequence[TeacherSample]: ...


class Sampler(Protocol):
    """The student as a generator."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, n: int, seed: int) -> Sequence[Sample]:
        """`n` independent responses to one prompt; the same arguments and weights give the same samples."""
        ...


class Scorer(Protocol):
    """Log-probabilities of given tokens, for token-level methods."""

    async def logprobs(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Sequence[float]: ...


class JudgeQuestion(msgspec.Struct, frozen=True):
    """A pair that the program could not decide: `differing_paths` for calls, empty for messages."""

    state: State
    action: ValidAction
    teacher_action: ValidAction
    tool: ToolSpec | None
    differing_paths: tuple[str, ...]
    evidence: str | None


class Judge(Protocol):
    """The matcher model. `identity` names model and prompt version (it is part of the cache key)."""

    identity: str

    async def judge(self, question: JudgeQuestion) -> Verdict: ...


class Matcher(Protocol):
    """Decides whether two actions at a state mean the same."""

    async def match(self, state: State, action: Action, teacher_action: ValidAction, evidence: str | None) -> Verdict: ...
