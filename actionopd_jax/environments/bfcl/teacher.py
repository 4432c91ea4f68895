"""The ground truth as a teacher, and the judge that needs no model."""

import ast
from collections import Counter
from collections.abc import Mapping
from typing import Any

from actionopd_jax.environments.bfcl.calls import canonical
from actionopd_jax.environments.bfcl.data import Entry, Tool
from actionopd_jax.errors import ConfigError, ServiceBusyError
from actionopd_jax.protocols import ChatRequest, JudgeQuestion
from actionopd_jax.records import (
    ChatReply,
    Match,
    Message,
    NoMatch,
    RawToolCall,
    State,
    ToolCall,
    Unavailable,
    Verdict,
    encode,
)
from actionopd_jax.seeds import python_random

TURN_DONE = "Done: everything you asked for is finished."
TURN_BLOCKED = "I cannot do this yet: information or a tool that it needs is missing."


class GroundTruthTeacher:
    """Answers with the next ground-truth call of the current turn that was not made yet, then ends the turn.

    It reads turn and calls off the visible history alone. `invalid_rate` of the draws are malformed calls;
    `error_rate` of them fail once as a busy service would, and succeed when asked again.
    """

    depends_on_task: bool = True

    def __init__(
        self, entries: Mapping[str, Entry], version: str, seed: int, invalid_rate: float, error_rate: float
    ) -> None:
        self.identity = f"bfcl-ground-truth-v1 {version} seed={seed} invalid={invalid_rate} error={error_rate}"
        self._entries = entries
        self._seed = seed
        self._invalid_rate = invalid_rate
        self._error_rate = error_rate
        self._failed: set[tuple[str, tuple[int, int]]] = set()

    async def complete(self, request: ChatRequest) -> ChatReply:
        entry = self._entries.get(request.task.task_id)
        if entry is None:
            raise ConfigError(f"bfcl has no task {request.task.task_id!r} among the chosen categories and classes")
        rng = python_random(self._seed, "bfcl-teacher", request.state.key, *request.draw)
        if rng.random() < self._error_rate and (draw := (request.state.key, request.draw)) not in self._failed:
            self._failed.add(draw)
            raise ServiceBusyError("the scripted bfcl teacher is busy (teacher.settings.error_rate)")
        action = next_action(entry, request.state)
        if rng.random() < self._invalid_rate:
            return ChatReply(content="", tool_calls=(RawToolCall(name=next(iter(entry.tools)), arguments="{"),))
        if isinstance(action, Message):
            return ChatReply(content=action.text)
        return ChatReply(content="", tool_calls=(RawToolCall(action.name, encode(action.arguments).decode()),))


def next_action(entry: Entry, state: State) -> ToolCall | Message:
    """The expert's action at a visible state; calls in another order, and other calls, are passed over."""
    turn = current_turn(entry, state)
    start = max((i for i, message in enumerate(state.messages) if message.role == "user"), default=0)
    made = Counter(_key(entry, call) for message in state.messages[start:] for call in message.tool_calls)
    for call in entry.calls[turn]:
        key = _key(entry, call)
        if made[key] == 0:
            return call
        made[key] -= 1
    return Message(text=TURN_DONE if entry.calls[turn] else TURN_BLOCKED)


def current_turn(entry: Entry, state: State) -> int:
    """The user turn that a state stands in; holds when the context budget dropped earlier turns."""
    said = [message.content for message in state.messages if message.role == "user"]
    for turn in range(max(len(said) - 1, 0), len(entry.turns)):
        if said and entry.turns[turn] == said[-1]:
            return turn
    raise ConfigError(f"the state shows no user turn of bfcl task {entry.task_id}; is it another task's state?")


def _key(entry: Entry, call: ToolCall) -> tuple[str, bytes]:
    tool: Tool | None = entry.tools.get(call.name)
    return call.name, canonical(call.arguments, tool.defaults if tool else {})


class TurnEndJudge:
    """Judges what a program can judge about BFCL.

    Messages: any two match, since the checker never reads them: a message ends the turn, whatever it says.
    Calls: they match when their arguments are equal once the defaults of the tool's Python signature
    (the evidence) are filled in.
    """

    identity: str = "bfcl-turn-end-v1"

    async def judge(self, question: JudgeQuestion) -> Verdict:
        match question.action, question.teacher_action:
            case Message(), Message():
                return Match(source=self.identity, detail="both end the turn")
            case ToolCall() as call, ToolCall() as expected if call.name == expected.name:
                if question.evidence is None:
                    return Unavailable(source=self.identity, detail=f"no source of {call.name}")
                defaults = signature_defaults(question.evidence)
                if canonical(call.arguments, defaults) == canonical(expected.arguments, defaults):
                    return Match(source=self.identity, detail="equal with defaults filled in")
        return NoMatch(source=self.identity, detail="different")


def signature_defaults(evidence: str) -> dict[str, Any]:
    """Literal default values in the signature of a function's source; empty when it is no function."""
    try:
        body = ast.parse(evidence).body
    except SyntaxError:
        return {}
    function = next((node for node in body if isinstance(node, ast.FunctionDef)), None)
    if function is None:
        return {}
    named = function.args.args[len(function.args.args) - len(function.args.defaults) :]
    return {name.arg: ast.literal_eval(value) for name, value in zip(named, function.args.defaults, strict=True)}
