"""From a response to the action that it takes: a tool call, a message, or nothing valid.

A student's response is read from its own token ids, never from a server's tool-call parser, which
may drop a malformed call and so turn an invalid output into a plain message. Tags are recognised
in the decoded text; tokens that end or start a turn are judged on the ids. No response makes these
functions raise; `EnvironmentFailure` means that a tool's schema or a rule's pattern is broken.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence

from actionopd_jax.chat.schema import argument_error
from actionopd_jax.chat.strict_json import LoneSurrogateError, StrictJSONError, check_text, decode_value
from actionopd_jax.chat.tokenizer import ChatTokenizer
from actionopd_jax.errors import EnvironmentFailure
from actionopd_jax.records import (
    Action,
    ChatMessage,
    ChatReply,
    Finish,
    Invalid,
    InvalidReason,
    Message,
    State,
    ToolCall,
)

_TAG = re.compile("<think>|</think>|<tool_call>|</tool_call>")
_CLOSING_TAG = re.compile(r"\s*</tool_call>")
# Calls in the markup of other chat formats; without this they would pass as messages.
_FOREIGN_CALL = re.compile(r"<(?:function|parameter)=[\w.-]+>|<function_calls?>|<invoke\s+name=|<tool_calls>|<tool_code>")
_MAX_DETAIL = 200


@dataclasses.dataclass(frozen=True, slots=True)
class Response:
    """A response's action, and the turn that enters the history (None when the action is invalid)."""

    action: Action
    message: ChatMessage | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Turn:
    """What a text holds: reasoning, visible text before the first call, decoded calls, text after the first call."""

    reasoning: str
    text: str
    calls: tuple[object, ...]
    text_after: str


class _InvalidTurnError(Exception):
    def __init__(self, reason: InvalidReason, detail: str) -> None:
        super().__init__(detail)
        self.invalid = Invalid(reason, detail[:_MAX_DETAIL])


def parse_response(ids: Sequence[int], finish: Finish, state: State, tokenizer: ChatTokenizer, thinking: bool) -> Response:
    """The action of a student's response at a state (method, "Actions: what is valid").

    Args:
        ids: the sampled ids, end token included.
        finish: why the generation stopped.
        state: the state as the student saw it.
        tokenizer: the student's.
        thinking: whether reasoning belongs to the student's turns. Without it, reasoning that a
            response holds all the same is read over but kept out of the history.
    """
    try:
        turn = _read(_response_text(ids, finish, tokenizer), first_call_only=False)
        if len(turn.calls) > 1:
            raise _InvalidTurnError(InvalidReason.SEVERAL_CALLS, f"{len(turn.calls)} calls in one turn")
        if turn.calls and turn.text_after:
            raise _InvalidTurnError(InvalidReason.TEXT_AFTER_CALL, f"text after the call: {turn.text_after}")
        action = _action(turn, state)
    except _InvalidTurnError as error:
        return Response(error.invalid, None)
    message = ChatMessage(
        role="assistant",
        content=turn.text,
        reasoning=turn.reasoning if thinking else "",
        tool_calls=(action,) if isinstance(action, ToolCall) else (),
    )
    return Response(action, message)


def parse_reply(reply: ChatReply, state: State) -> Action:
    """The action of a teacher's reply: the first of several calls, else the message.

    The rules are the student's. Calls and reasoning that the service left in the content as text
    are recognised there.
    """
    try:
        if not reply.tool_calls:
            return _action(_read(reply.content, first_call_only=True), state)
        call = reply.tool_calls[0]
        arguments = _json(call.arguments) if call.arguments.strip() else {}
        return _call({"name": call.name, "arguments": arguments}, state)
    except _InvalidTurnError as error:
        return error.invalid


def _response_text(ids: Sequence[int], finish: Finish, tokenizer: ChatTokenizer) -> str:
    if finish is not Finish.STOP or not ids or ids[-1] != tokenizer.end_id:
        raise _InvalidTurnError(InvalidReason.LENGTH, "no end token")
    body = ids[:-1]
    if any(token_id in tokenizer.turn_ids for token_id in body):
        raise _InvalidTurnError(InvalidReason.CONTROL_TOKEN, "a token that ends or starts a turn stands inside the response")
    try:
        return tokenizer.decode(body)
    except ValueError as error:
        raise _InvalidTurnError(InvalidReason.ENCODING, str(error)) from error


def _read(text: str, *, first_call_only: bool) -> _Turn:
    """Splits a turn's text at its tags.

    A call's JSON is read from its opening tag on, so that tags inside strings are text. With
    `first_call_only` nothing behind the first complete call is looked at.
    """
    reasoning: list[str] = []
    visible = ["", ""]  # before and after the first call
    calls: list[object] = []
    position = 0
    while (tag := _TAG.search(text, position)) is not None:
        visible[bool(calls)] += text[position : tag.start()]
        if tag.group() == "<think>":
            end = text.find("</think>", tag.end())
            if end < 0:
                raise _InvalidTurnError(InvalidReason.UNCLOSED_REASONING, "reasoning is never closed")
            reasoning.append(text[tag.end() : end].strip())
            position = end + len("</think>")
        elif tag.group() == "<tool_call>":
            value, end = _tagged_json(text, tag.end())
            calls.append(value)
            position = end
            if first_call_only:
                break
        elif tag.group() == "</think>":
            raise _InvalidTurnError(InvalidReason.UNCLOSED_REASONING, "reasoning is closed but was never opened")
        else:
            raise _InvalidTurnError(InvalidReason.MALFORMED_CALL, "a call is closed but was never opened")
    if not (calls and first_call_only):
        visible[bool(calls)] += text[position:]
    return _Turn("\n".join(filter(None, reasoning)), visible[0].strip(), tuple(calls), visible[1].strip())


def _tagged_json(text: str, start: int) -> tuple[object, int]:
    """The JSON value behind an opening tag, and the position after its closing tag."""
    if text.find("</tool_call>", start) < 0:
        raise _InvalidTurnError(InvalidReason.MALFORMED_CALL, "a call is never closed")
    value, end = _decode(text, start)
    closing = re.compile(r"\s*</tool_call>").match(text, end)
    if closing is None:
        raise _InvalidTurnError(
            InvalidReason.MALFORMED_CALL, f"the closing tag does not follow the JSON: {text[end : end + 40]!a}"
        )
    return value, closing.end()


def _json(text: str) -> object:
    value, end = _decode(text, 0)
    if text[end:].strip(" \t\n\r"):
        raise _InvalidTurnError(InvalidReason.MALFORMED_JSON, f"text after the JSON: {text[end : end + 40]!a}")
    return value


def _decode(text: str, start: int) -> tuple[object, int]:
    try:
        return decode_value(text, start)
    except LoneSurrogateError as error:
        raise _InvalidTurnError(InvalidReason.ENCODING, str(error)) from error
    except StrictJSONError as error:
        raise _InvalidTurnError(InvalidReason.MALFORMED_JSON, str(error)) from error


def _action(turn: _Turn, state: State) -> ToolCall | Message:
    return _call(turn.calls[0], state) if turn.calls else _message(turn.text, state)


def _call(value: object, state: State) -> ToolCall:
    if not isinstance(value, dict):
        raise _InvalidTurnError(InvalidReason.MALFORMED_CALL, f"a call must be a JSON object, not a {type(value).__name__}")
    unknown = value.keys() - {"name", "arguments"}
    if unknown:
        raise _InvalidTurnError(InvalidReason.MALFORMED_CALL, f"unknown keys in a call: {', '.join(sorted(unknown))}")
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str):
        raise _InvalidTurnError(InvalidReason.MALFORMED_CALL, "a call must name its tool by a string")
    if not state.allow_tool_calls:
        raise _InvalidTurnError(InvalidReason.NOT_ALLOWED, "tool calls are not allowed here")
    tool = next((tool for tool in state.tools if tool.name == name), None)
    if tool is None:
        raise _InvalidTurnError(InvalidReason.UNKNOWN_TOOL, f"unknown tool: {name!a}")
    if not isinstance(arguments, dict):
        raise _InvalidTurnError(InvalidReason.ARGUMENTS, f"arguments must be an object, not a {type(arguments).__name__}")
    error = argument_error(tool, arguments)
    if error is not None:
        raise _InvalidTurnError(InvalidReason.ARGUMENTS, error)
    return ToolCall(name, arguments)


def _message(text: str, state: State) -> Message:
    text = text.strip()
    if not text:
        raise _InvalidTurnError(InvalidReason.EMPTY, "nothing visible")
    try:
        check_text(text)
    except LoneSurrogateError as error:
        raise _InvalidTurnError(InvalidReason.ENCODING, str(error)) from error
    if _FOREIGN_CALL.search(text):
        raise _InvalidTurnError(InvalidReason.MALFORMED_CALL, "a call in the syntax of another chat format")
    if not state.allow_messages:
        raise _InvalidTurnError(InvalidReason.NOT_ALLOWED, "messages are not allowed here")
    for rule in state.rules:
        if _rule_pattern(rule.pattern).search(text) and not _was_called(rule.required_tool, state):
            raise _InvalidTurnError(InvalidReason.PROTOCOL, f"{rule.name}: {rule.required_tool} was not called before")
    return Message(text)


@functools.lru_cache(maxsize=256)
def _rule_pattern(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise EnvironmentFailure(f"protocol rule pattern {pattern!r} is no regular expression: {error}") from error


def _was_called(tool: str, state: State) -> bool:
    return any(call.name == tool for message in state.messages for call in message.tool_calls)
