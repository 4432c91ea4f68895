"""Frozen records that travel between the layers, and go to disk as JSON lines.

`msgspec` structs: immutable, typed on decoding, cheap to encode. Arrays never live here, except in
`Example`, which is a plain dataclass because it never leaves the process.
"""

import dataclasses
import enum
import functools
import hashlib
from typing import Any, Literal

import msgspec
import numpy as np
from jaxtyping import Float32, Int32

JsonObject = dict[str, Any]
"""A decoded JSON object; values are JSON values."""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all records."""


# -- actions (method: "Actions: what is valid") -------------------------------------------------


class InvalidReason(enum.StrEnum):
    """Why a response is not an action."""

    UNCLOSED_REASONING = "unclosed_reasoning"
    LENGTH = "length"
    SEVERAL_CALLS = "several_calls"
    MALFORMED_CALL = "malformed_call"
    MALFORMED_JSON = "malformed_json"
    UNKNOWN_TOOL = "unknown_tool"
    ARGUMENTS = "arguments"
    EMPTY = "empty"
    TEXT_AFTER_CALL = "text_after_call"
    CONTROL_TOKEN = "control_token"
    ENCODING = "encoding"
    NOT_ALLOWED = "not_allowed"
    PROTOCOL = "protocol"


class ToolCall(_Record, frozen=True, tag="tool_call"):
    """A validated call of one tool. `arguments` conforms to the tool's JSON schema."""

    name: str
    arguments: JsonObject


class Message(_Record, frozen=True, tag="message"):
    """A message to the user: the visible text of a response."""

    text: str


class Invalid(_Record, frozen=True, tag="invalid"):
    """A response that is no action; it is rewarded with -1 and never executed."""

    reason: InvalidReason
    detail: str = ""


Action = ToolCall | Message | Invalid
ValidAction = ToolCall | Message


# -- what the student sees ------------------------------------------------------------------------


class ChatMessage(_Record, frozen=True, omit_defaults=True):
    """One entry of a conversation. `reasoning` and `tool_calls` belong to assistant turns only."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


class ToolSpec(_Record, frozen=True):
    """A tool as the student sees it: `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: JsonObject


class ProtocolRule(_Record, frozen=True):
    """A message matching `pattern` (regular expression, ignoring case) is invalid unless `required_tool` was called."""

    name: str
    pattern: str
    required_tool: str


class Observation(_Record, frozen=True):
    """What an environment shows: `messages` are appended to the history (the whole start after a reset)."""

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...]
    allow_tool_calls: bool = True
    allow_messages: bool = True
    rules: tuple[ProtocolRule, ...] = ()


class State(_Record, frozen=True, dict=True):
    """Exactly what the student may see at one decision (after the context budget was applied)."""

    environment: str
    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSpec, ...]
    allow_tool_calls: bool = True
    allow_messages: bool = True
    rules: tuple[ProtocolRule, ...] = ()

    @functools.cached_property
    def key(self) -> str:
        """Digest of the visible state: equal states have equal keys, and nothing hidden enters."""
        return digest(self)


# -- tasks and environments -----------------------------------------------------------------------


class Task(_Record, frozen=True):
    """One task start. `task_id` is unique within (environment, split)."""

    environment: str
    split: str
    task_id: str

    @property
    def key(self) -> str:
        return f"{self.environment}/{self.split}/{self.task_id}"


class EndReason(enum.StrEnum):
    """Why an episode ended."""

    DONE = "done"  # the environment says so
    DECISION_LIMIT = "decision_limit"
    CONTEXT = "context"  # the protected part of the prompt does not fit its budget
    INVALID_ACTION = "invalid_action"  # the best candidate is no action
    NO_TEACHER = "no_teacher"  # no valid teacher sample after the retries
    ENVIRONMENT_FAILURE = "environment_failure"


class End(_Record, frozen=True):
    """The environment is over; `detail` is for people."""

    reason: EndReason = EndReason.DONE
    detail: str = ""


class Score(_Record, frozen=True):
    """Outcome of an episode. `partial` in [0, 1]."""

    success: bool
    partial: float
    details: JsonObject = {}


# -- sampling and supervision ---------------------------------------------------------------------


class Sampling(_Record, frozen=True):
    """Decoding settings. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 switch the truncation off."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


class Finish(enum.StrEnum):
    """Why generation stopped."""

    STOP = "stop"  # the end token was sampled; it is the last id
    LENGTH = "length"


class Sample(_Record, frozen=True):
    """One sampled response. `logprobs`: log-softmax(logits/T) of each id over the full vocabulary."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    policy_version: int


class RawToolCall(_Record, frozen=True):
    """A tool call as a chat API returns it: `arguments` is JSON text that nobody checked yet."""

    name: str
    arguments: str


class ChatReply(_Record, frozen=True):
    """One assistant turn from a chat model, unchecked."""

    content: str
    tool_calls: tuple[RawToolCall, ...] = ()
    reasoning: str = ""


class TeacherSample(_Record, frozen=True):
    """A valid teacher action and how many requests it took (1 to 3)."""

    action: ToolCall | Message
    attempts: int
    reply: ChatReply


class Match(_Record, frozen=True, tag="match"):
    """The two actions mean the same. `source`: "canonical", "normalised", or the judging model's name."""

    source: str
    detail: str = ""


class NoMatch(_Record, frozen=True, tag="no_match"):
    """They do not, or nobody can tell."""

    source: str
    detail: str = ""


class Unavailable(_Record, frozen=True, tag="unavailable"):
    """No verdict could be had: the group is without supervision. Never a reward of 0."""

    source: str
    detail: str = ""


Verdict = Match | NoMatch | Unavailable


# -- what a rollout leaves ------------------------------------------------------------------------


class Candidate(_Record, frozen=True):
    """One student response at a state: sampled ids (verbatim, end token included) and what came of it."""

    ids: tuple[int, ...]
    behaviour_logprobs: tuple[float, ...]
    finish: Finish
    action: ToolCall | Message | Invalid
    verdicts: tuple[Match | NoMatch | Unavailable, ...]  # one per teacher sample
    match_count: int
    reward: float | None  # None: without supervision


class StateGroup(_Record, frozen=True):
    """A state with its N candidates, always complete."""

    decision: int
    state_key: str
    prompt_ids: tuple[int, ...]
    teacher: tuple[TeacherSample, ...]
    candidates: tuple[Candidate, ...]
    committed: int | None  # None: nothing valid could be committed
    policy_version: int

    @property
    def supervised(self) -> bool:
        return all(candidate.reward is not None for candidate in self.candidates)


class Trajectory(_Record, frozen=True):
    """Everything collected from one task start."""

    step: int
    start: int  # position of this start within the step
    task: Task
    groups: tuple[StateGroup, ...]
    end: EndReason
    end_detail: str
    score: Score | None
    environment_steps: int
    wall_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """The one product of every method: a token sequence with a weight per generated token.

    Attributes:
        prompt_ids: `[P]` context, never trained on.
        response_ids: `[R]` generated tokens, end token included.
        weights: `[R]` signal per generated token (an advantage, or 1 for likelihood training).
        group: identifies the state group (minibatches keep groups whole).
        trajectory: identifies the task start.
        behaviour_logprobs: `[R]` the sampler's own log-probabilities, where a sampler generated the response;
            only to report how far the trainer's differ.
    """

    prompt_ids: Int32[np.ndarray, " prompt"]
    response_ids: Int32[np.ndarray, " response"]
    weights: Float32[np.ndarray, " response"]
    group: str
    trajectory: str
    behaviour_logprobs: Float32[np.ndarray, " response"] | None = None

    def __post_init__(self) -> None:
        if self.response_ids.shape != self.weights.shape:
            raise ValueError(f"{len(self.response_ids)} response ids but {len(self.weights)} weights in group {self.group}")
        if len(self.prompt_ids) == 0 or len(self.response_ids) == 0:
            raise ValueError(f"empty prompt or response in group {self.group}")


_encoder = msgspec.json.Encoder(order="deterministic")


def encode(value: object) -> bytes:
    """Deterministic JSON (object keys sorted) of a record or a JSON value."""
    return _encoder.encode(value)


def digest(value: object) -> str:
    """SHA-256 of `encode(value)`, as 64 hex digits."""
    return hashlib.sha256(_encoder.encode(value)).hexdigest()
