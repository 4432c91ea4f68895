"""Scripted participants: a counting environment, and a student, teacher and matcher that follow a script.

The student's first id says what it does: 1 to 9 call `add`, 20 to 29 send a message, 90 is no action.
"""

import dataclasses
import threading
from collections.abc import Callable, Sequence

from actionopd_jax.chat.actions import Response
from actionopd_jax.chat.prompt import ContextOverflow, Prompt
from actionopd_jax.records import (
    ChatMessage,
    ChatReply,
    End,
    Finish,
    Invalid,
    InvalidReason,
    Match,
    Message,
    NoMatch,
    Observation,
    Sample,
    Sampling,
    Score,
    State,
    Task,
    TeacherSample,
    ToolCall,
    ToolSpec,
    Unavailable,
)
from actionopd_jax.rollout.group import Source
from actionopd_jax.rollout.settings import GroupRules
from actionopd_jax.rollout.student import Student

END_TOKEN = 7
INVALID = 90
SAMPLING = Sampling(temperature=0.6, top_p=0.95, top_k=20, max_tokens=64)
ADD = ToolSpec("add", "adds n", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})


def add(n: int) -> ToolCall:
    return ToolCall("add", {"n": n})


def say(number: int) -> Message:
    return Message(f"message {number}")


def action_of(first_id: int):
    if first_id == INVALID:
        return Invalid(InvalidReason.MALFORMED_JSON, "scripted")
    return say(first_id) if first_id >= 20 else add(first_id)


def task(name: str = "three") -> Task:
    return Task("counter", "train", name)


def rules(**changes) -> GroupRules:
    values = {
        "num_candidates": 4,
        "num_teacher_samples": 3,
        "frequency_bonus": 0.5,
        "reward": "agreement",
        "commit": "best",
        "max_decisions": 5,
        "sampling": SAMPLING,
    }
    return GroupRules(**(values | changes))


class CounterEnvironment:
    """Counts up to `target`. `faults` maps a method's name to what happens there instead of an answer."""

    def __init__(self, suite: "CounterSuite", start: Task, target: int, faults: dict[str, Callable[[], object]]) -> None:
        self._suite = suite
        self._task = start
        self._target = target
        self._faults = faults
        self.total = 0
        self.threads = {threading.current_thread()}
        self.closed = threading.Event()

    def _enter(self, method: str) -> object:
        self.threads.add(threading.current_thread())
        return self._faults[method]() if method in self._faults else None

    def reset(self):
        if (fault := self._enter("reset")) is not None:
            return fault
        return Observation((ChatMessage("system", "count"), ChatMessage("user", f"to {self._target}")), (ADD,))

    def step(self, action):
        if (fault := self._enter("step")) is not None:
            return fault
        if isinstance(action, ToolCall):
            self.total += action.arguments["n"]
        if self.total >= self._target:
            return End(detail="reached")
        return Observation((ChatMessage("tool", str(self.total)),), (ADD,))

    def score(self):
        if (fault := self._enter("score")) is not None:
            return fault
        return Score(self.total == self._target, min(self.total / self._target, 1.0), {"total": self.total})

    def evidence(self, tool):
        self._suite.evidence_asked.append(tool)
        self._enter("evidence")
        return f"source of {tool}"

    def close(self):
        self._enter("close")
        self._suite.open -= 1
        self.closed.set()


class CounterSuite:
    name = "counter"
    version = "1"
    promises_evidence = True

    def __init__(self, target: int = 3, faults: dict[str, Callable[[], object]] | None = None) -> None:
        self._target = target
        self._faults = faults or {}
        self._lock = threading.Lock()
        self.made: list[CounterEnvironment] = []
        self.evidence_asked: list[str] = []
        self.open = 0
        self.most_open = 0

    def make(self, start: Task) -> CounterEnvironment:
        with self._lock:
            if "make" in self._faults:
                self._faults["make"]()
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            self.made.append(CounterEnvironment(self, start, self._target, self._faults))
            return self.made[-1]


class Prompts:
    """Prompt ids: the number of messages, then the length of each. Refuses more than `budget` messages."""

    def __init__(self, budget: int = 100) -> None:
        self._budget = budget
        self.states: list[State] = []

    def build(self, state: State) -> Prompt:
        if len(state.messages) > self._budget:
            raise ContextOverflow(len(state.messages), self._budget)
        self.states.append(state)
        return Prompt(state, (len(state.messages), *(len(message.content) for message in state.messages)))


Script = Callable[[Sequence[int], int, int], Sequence[int]]
"""(prompt ids, n, seed) -> first id of each response."""


class ScriptedSampler:
    def __init__(self, script: Script | Sequence[int], policy_version: int = 0, log: list[str] | None = None) -> None:
        self._script = script
        self.policy_version = policy_version
        self.log = [] if log is None else log
        self.calls: list[tuple[tuple[int, ...], Sampling, int, int]] = []

    async def generate(self, prompt_ids, sampling, n, seed):
        self.log.append("student")
        self.calls.append((tuple(prompt_ids), sampling, n, seed))
        firsts = self._script(prompt_ids, n, seed) if callable(self._script) else self._script
        return [
            Sample(
                ids=(first, 50 + i, END_TOKEN),
                logprobs=(-0.5, -0.25, 0.0),
                finish=Finish.LENGTH if first == INVALID else Finish.STOP,
                policy_version=self.policy_version,
            )
            for i, first in enumerate(firsts)
        ]


@dataclasses.dataclass(frozen=True)
class ScriptedStudent(Student):
    def parse(self, sample: Sample, state: State) -> Response:
        action = action_of(sample.ids[0])
        if isinstance(action, Invalid):
            message = None
        elif isinstance(action, ToolCall):
            message = ChatMessage("assistant", "", tool_calls=(action,))
        else:
            message = ChatMessage("assistant", action.text)
        return Response(action, message)


def student(script, *, policy_version: int = 0, prompts: Prompts | None = None, log: list[str] | None = None) -> Student:
    sampler = ScriptedSampler(script, policy_version, log)
    return ScriptedStudent(sampler, prompts or Prompts(), tokenizer=None, thinking=False)


class ScriptedTeacher:
    def __init__(self, actions, log: list[str] | None = None) -> None:
        self._actions = actions
        self.log = [] if log is None else log
        self.states: list[State] = []

    async def sample(self, state, start, k):
        self.log.append("teacher")
        self.states.append(state)
        actions = self._actions(state) if callable(self._actions) else self._actions
        return [TeacherSample(action, 1, ChatReply("")) for action in actions]


class ScriptedMatcher:
    """Equal actions match; a pair for which `unavailable` is true has no verdict."""

    def __init__(self, unavailable: Callable[[object, object], bool] = lambda action, other: False) -> None:
        self._unavailable = unavailable
        self.pairs: list[tuple[object, object, str | None]] = []

    async def match(self, state, action, teacher_action, evidence):
        self.pairs.append((action, teacher_action, evidence))
        if self._unavailable(action, teacher_action):
            return Unavailable("scripted", "down")
        return Match("scripted") if action == teacher_action else NoMatch("scripted")


TEACHER = (add(1), add(1), add(2))


def source(teacher=TEACHER, *, suite=None, matcher=None, log=None) -> Source:
    return Source(suite or CounterSuite(), ScriptedTeacher(teacher, log), matcher or ScriptedMatcher())
