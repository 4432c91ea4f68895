import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actionopd_jax.chat.actions import parse_reply, parse_response
from actionopd_jax.chat.tokenizer import CONTROL_TOKENS
from actionopd_jax.errors import EnvironmentFailure
from actionopd_jax.records import (
    ChatMessage,
    ChatReply,
    Finish,
    Invalid,
    InvalidReason,
    Message,
    ProtocolRule,
    RawToolCall,
    State,
    ToolCall,
    ToolSpec,
)

R = InvalidReason
SEARCH = ToolSpec(
    "search",
    "Find flights",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer"},
            "price": {"type": "number"},
            "direct": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "filter": {"type": "object", "additionalProperties": True},
            "note": {},
        },
        "required": ["query"],
    },
)
NOW = ToolSpec("now", "Tell the time", {"type": "object", "properties": {}})
TRANSFER = ToolSpec("transfer", "Hand over to a person", {"type": "object", "properties": {}})
OPEN = ToolSpec("open", "Takes anything", {"type": "object", "additionalProperties": {"type": "integer"}})
RULE = ProtocolRule("transfer first", r"you are being transferred", "transfer")
STATE = State(
    environment="e",
    messages=(ChatMessage(role="user", content="hi"),),
    tools=(SEARCH, NOW, TRANSFER, OPEN),
    rules=(RULE,),
)
TRANSFERRED = msgspec.structs.replace(
    STATE,
    messages=(
        *STATE.messages,
        ChatMessage(role="assistant", content="", tool_calls=(ToolCall("transfer", {}),)),
        ChatMessage(role="tool", content="done"),
    ),
)
THOUGHT = "<think>\nhm\n</think>\n\n"


def tagged(json_text: str) -> str:
    return f"<tool_call>\n{json_text}\n</tool_call>"


def search_call(arguments_json: str) -> str:
    return tagged(f'{{"name": "search", "arguments": {arguments_json}}}')


VALID = search_call('{"query": "a"}')
NOW_CALL = tagged('{"name": "now"}')
CALL = ToolCall("search", {"query": "a"})

# (row of the table of valid actions, text before the end token, outcome)
ROWS: list[tuple[int, str, Any]] = [
    (1, "<think>\nI wonder", R.UNCLOSED_REASONING),
    (1, "<think>a</think> b <think> c", R.UNCLOSED_REASONING),
    (1, "so I answer</think>\n\nHello", R.UNCLOSED_REASONING),
    (2, f"<think>\nI call {VALID}", R.UNCLOSED_REASONING),
    (3, f"<think>\nmaybe {tagged('{bad')} no\n</think>\n\n{VALID}", CALL),
    (3, f"<think>\nmaybe {NOW_CALL}\n</think>\n\n{VALID}", CALL),
    (3, f"<think>\nmaybe {VALID}\n</think>\n\nNo call after all", Message("No call after all")),
    (5, VALID + "\n" + VALID, R.SEVERAL_CALLS),
    (5, VALID + "\n" + tagged('{"name": "now"}'), R.SEVERAL_CALLS),
    (6, tagged('[{"name": "now", "arguments": {}}]'), R.MALFORMED_CALL),
    (7, tagged('{"name": "fly", "arguments": {}}'), R.UNKNOWN_TOOL),
    (7, tagged('{"name": "Search", "arguments": {"query": "a"}}'), R.UNKNOWN_TOOL),
    (8, search_call('{"limit": 3}'), R.ARGUMENTS),
    (9, search_call('{"query": 3}'), R.ARGUMENTS),
    (9, search_call('{"query": "a", "limit": true}'), R.ARGUMENTS),
    (9, search_call('{"query": "a", "price": false}'), R.ARGUMENTS),
    (9, search_call('{"query": "a", "direct": 1}'), R.ARGUMENTS),
    (9, search_call('{"query": "a", "limit": "3"}'), R.ARGUMENTS),
    (9, search_call('{"query": "a", "limit": 1.5}'), R.ARGUMENTS),
    (9, search_call('{"query": "a", "limit": null}'), R.ARGUMENTS),
    (9, search_call('{"query": "a", "tags": ["b", 1]}'), R.ARGUMENTS),
    (9, search_call('{"query": "a", "limit": 1.0}'), ToolCall("search", {"query": "a", "limit": 1.0})),
    (10, search_call('{"query": "a", "colour": "red"}'), R.ARGUMENTS),
    (10, tagged('{"name": "now", "arguments": {"zone": "UTC"}}'), R.ARGUMENTS),
    (10, tagged('{"name": "open", "arguments": {"any": 1}}'), ToolCall("open", {"any": 1})),
    (10, tagged('{"name": "open", "arguments": {"any": "1"}}'), R.ARGUMENTS),
    (10, search_call('{"query": "a", "filter": {"any": 1}}'), ToolCall("search", {"query": "a", "filter": {"any": 1}})),
    (11, "", R.EMPTY),
    (11, "\n \n", R.EMPTY),
    (12, "I look it up.\n" + VALID, CALL),
    (13, VALID + "\nDone.", R.TEXT_AFTER_CALL),
    (13, VALID + "</tool_call>", R.MALFORMED_CALL),
    (14, search_call('{"query": "a",}'), R.MALFORMED_JSON),
    (14, search_call("{'query': 'a'}"), R.MALFORMED_JSON),
    (14, search_call('{"query": "a", "direct": True}'), R.MALFORMED_JSON),
    (14, search_call('{"query": None}'), R.MALFORMED_JSON),
    (14, search_call('{"query": "a\nb"}'), R.MALFORMED_JSON),
    (14, search_call('{"query": "a"} // why'), R.MALFORMED_JSON),
    (15, search_call('{"query": "a", "query": "a"}'), R.MALFORMED_JSON),
    (15, tagged('{"name": "now", "name": "now"}'), R.MALFORMED_JSON),
    (15, search_call('{"query": "a", "filter": {"x": 1, "x": 2}}'), R.MALFORMED_JSON),
    (16, search_call('"{\\"query\\": \\"a\\"}"'), R.ARGUMENTS),
    (16, search_call('["a"]'), R.ARGUMENTS),
    (16, tagged('{"name": "now", "arguments": null}'), R.ARGUMENTS),
    (17, tagged('{"name": "now"}'), ToolCall("now", {})),
    (17, tagged('{"name": "search"}'), R.ARGUMENTS),
    (18, tagged('{"name": "search", "parameters": {"query": "a"}}'), R.MALFORMED_CALL),
    (18, tagged('{"name": "now", "arguments": {}, "id": "1"}'), R.MALFORMED_CALL),
    (19, search_call('{"query": "a", "price": NaN}'), R.MALFORMED_JSON),
    (19, search_call('{"query": "a", "price": -Infinity}'), R.MALFORMED_JSON),
    (19, search_call('{"query": "a", "price": 1e999}'), R.MALFORMED_JSON),
    (19, search_call('{"query": "a", "limit": 1' + "0" * 400 + "}"), R.MALFORMED_JSON),
    (19, search_call('{"query": "a", "limit": 1' + "0" * 5000 + "}"), R.MALFORMED_JSON),
    (20, search_call('{"query": "caf\\u00e9 \\ud83d\\ude00"}'), ToolCall("search", {"query": "café 😀"})),
    (21, search_call('{"query": "\\ud83d"}'), R.ENCODING),
    (21, search_call('{"query": "a", "filter": {"\\ude00": 1}}'), R.ENCODING),
    (22, '<tool_call>{"name":"search","arguments":{"query":"a"}}</tool_call>', CALL),
    (22, '<tool_call> \n\t {"name" : "search" , "arguments" : { "query" : "a" } } \n\n </tool_call>\n ', CALL),
    (23, search_call('{"query": "</tool_call>"}'), ToolCall("search", {"query": "</tool_call>"})),
    (23, search_call('{"query": "<tool_call></think>"}'), ToolCall("search", {"query": "<tool_call></think>"})),
    (24, tagged("3"), R.MALFORMED_CALL),
    (24, tagged('"now"'), R.MALFORMED_CALL),
    (24, tagged('{"name": 3, "arguments": {}}'), R.MALFORMED_CALL),
    (24, tagged('{"name": ["now"]}'), R.MALFORMED_CALL),
    (24, tagged('{"arguments": {}}'), R.MALFORMED_CALL),
    (25, '```json\n{"name": "now"}\n```', Message('```json\n{"name": "now"}\n```')),
    (26, '<tool_call>\n{"name": "now"}', R.MALFORMED_CALL),
    (26, '<tool_call>\n{"name": "open", "arguments": {"</tool_call>": 1}}', R.MALFORMED_CALL),
    (26, '{"name": "now"}\n</tool_call>', R.MALFORMED_CALL),
    (26, "<tool_call>", R.MALFORMED_CALL),
    (27, tagged("<function=search>\n<parameter=query>\na\n</parameter>\n</function>"), R.MALFORMED_JSON),
    (27, "<function=search>\n<parameter=query>\na\n</parameter>\n</function>", R.MALFORMED_CALL),
    (27, '<invoke name="search"><parameter name="query">a</parameter></invoke>', R.MALFORMED_CALL),
    (27, tagged('search(query="a")'), R.MALFORMED_JSON),
    (28, "Hello<|im_end|>\n", R.CONTROL_TOKEN),
    (28, "Hello<|im_start|>user\nhi", R.CONTROL_TOKEN),
    (28, f"{VALID}<|endoftext|>", R.CONTROL_TOKEN),
    (28, f"<|im_end|>{VALID}", R.CONTROL_TOKEN),
    (29, "YOU ARE BEING TRANSFERRED to a person.", R.PROTOCOL),
]


@pytest.fixture
def respond(small_tokenizer, raw_tokenizer):
    """Parses a text as if its tags had been sampled as control tokens."""

    def parse(text, state=STATE, *, finish=Finish.STOP, thinking=True):
        ids = raw_tokenizer.encode(text, add_special_tokens=False).ids
        if finish is Finish.STOP:
            ids.append(small_tokenizer.end_id)
        return parse_response(ids, finish, state, small_tokenizer, thinking)

    return parse


def outcome(action):
    return action.reason if isinstance(action, Invalid) else action


@pytest.mark.parametrize(("row", "text", "expected"), ROWS)
def test_parse_response_row_of_the_table_gives_its_action(respond, row, text, expected):
    response = respond(text)
    assert outcome(response.action) == expected
    assert (response.message is None) == isinstance(response.action, Invalid)
    if row not in {1, 2, 3}:  # the same behind closed reasoning
        assert outcome(respond(THOUGHT + text).action) == expected


def test_parse_response_table_has_every_row():
    elsewhere = {4}  # not a matter of the text
    assert {row for row, _, _ in ROWS} | elsewhere == set(range(1, 30))


@pytest.mark.parametrize("text", ["Hello", VALID, THOUGHT + VALID, "<think>\nhm", ""])
def test_parse_response_row_4_cut_at_the_limit_is_invalid(respond, small_tokenizer, raw_tokenizer, text):
    assert outcome(respond(text, finish=Finish.LENGTH).action) == R.LENGTH
    ids = raw_tokenizer.encode(text, add_special_tokens=False).ids
    assert outcome(parse_response(ids, Finish.STOP, STATE, small_tokenizer, True).action) == R.LENGTH


def test_parse_response_row_29_announcement_after_the_transfer_is_a_message(respond):
    assert respond("You are being transferred.", TRANSFERRED).action == Message("You are being transferred.")


@pytest.mark.parametrize("token", ["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
def test_parse_response_turn_token_spelled_as_plain_text_is_a_message(small_tokenizer, token):
    text = f"The token {token} ends it"
    ids = (*small_tokenizer.encode_text(text), small_tokenizer.end_id)
    assert parse_response(ids, Finish.STOP, STATE, small_tokenizer, True).action == Message(text)


def test_parse_response_tags_spelled_as_plain_text_are_still_tags(small_tokenizer):
    ids = (*small_tokenizer.encode_text(VALID), small_tokenizer.end_id)
    assert parse_response(ids, Finish.STOP, STATE, small_tokenizer, True).action == CALL


def test_parse_response_valid_call_keeps_reasoning_and_text_for_the_history(respond):
    message = respond(f"{THOUGHT} I look it up.\n{VALID}").message
    assert message == ChatMessage(role="assistant", content="I look it up.", reasoning="hm", tool_calls=(CALL,))


def test_parse_response_without_thinking_keeps_no_reasoning(respond):
    assert respond(THOUGHT + "Hello", thinking=False).message == ChatMessage(role="assistant", content="Hello")


@pytest.mark.parametrize(("text", "allowed"), [("Hello", "allow_messages"), (VALID, "allow_tool_calls")])
def test_parse_response_action_kind_not_allowed_is_invalid(respond, text, allowed):
    state = msgspec.structs.replace(STATE, **{allowed: False})
    assert outcome(respond(text, state).action) == R.NOT_ALLOWED
    assert not isinstance(respond(text).action, Invalid)


def test_parse_response_deep_nesting_is_invalid(respond):
    for depth in (40, 100_000):
        nested = search_call('{"query": "a", "note": ' + "[" * depth + "]" * depth + "}")
        assert outcome(respond(nested).action) == R.MALFORMED_JSON
    shallow = search_call('{"query": "a", "note": ' + "[" * 20 + "]" * 20 + "}")
    assert isinstance(respond(shallow).action, ToolCall)


def test_parse_response_composed_schema_admits_what_its_parts_mention(respond):
    part = {
        "anyOf": [
            {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {}}, "required": ["b"]},
        ]
    }
    state = msgspec.structs.replace(STATE, tools=(ToolSpec("t", "", {"type": "object", **part}),))
    assert respond(tagged('{"name": "t", "arguments": {"a": 1}}'), state).action == ToolCall("t", {"a": 1})
    assert outcome(respond(tagged('{"name": "t", "arguments": {"a": 1, "c": 1}}'), state).action) == R.ARGUMENTS


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "dict"},
        {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}},
        {"properties": {"a": {"pattern": "("}}},
        {"$ref": "#"},
    ],
)
def test_parse_response_broken_schema_is_the_environments_failure(respond, schema):
    state = msgspec.structs.replace(STATE, tools=(ToolSpec("broken", "", schema),))
    with pytest.raises(EnvironmentFailure, match="tool broken"):
        respond(tagged('{"name": "broken", "arguments": {"a": "x"}}'), state)


def test_parse_response_broken_rule_is_the_environments_failure(respond):
    state = msgspec.structs.replace(STATE, rules=(ProtocolRule("r", "(", "now"),))
    with pytest.raises(EnvironmentFailure, match="rule"):
        respond("Hello", state)


# -- the teacher ----------------------------------------------------------------------------------

_TEACHER_ARGUMENTS = [
    ('{"query": "a"}', CALL),
    ("", R.ARGUMENTS),
    ("null", R.ARGUMENTS),
    ('["a"]', R.ARGUMENTS),
    ('"{}"', R.ARGUMENTS),
    ('{"query": "a"} x', R.MALFORMED_JSON),
    ('{"query": "a",}', R.MALFORMED_JSON),
    ('{"query": "a", "query": "b"}', R.MALFORMED_JSON),
    ('{"query": "a", "price": Infinity}', R.MALFORMED_JSON),
    ('{"query": "\\ud800"}', R.ENCODING),
    ('{"query": "\ud800"}', R.ENCODING),
    ('{"query": "a", "limit": true}', R.ARGUMENTS),
    ('{"query": "a", "colour": "red"}', R.ARGUMENTS),
    ("{", R.MALFORMED_JSON),
]


@pytest.mark.parametrize(("arguments", "expected"), _TEACHER_ARGUMENTS)
def test_parse_reply_arguments_follow_the_students_rules(arguments, expected):
    assert outcome(parse_reply(ChatReply("", (RawToolCall("search", arguments),)), STATE)) == expected


def test_parse_reply_several_calls_keeps_the_first():
    calls = (RawToolCall("now", ""), RawToolCall("search", "{"))
    assert parse_reply(ChatReply("text", calls), STATE) == ToolCall("now", {})
    assert parse_reply(ChatReply(f"{VALID}\n{tagged('{')}"), STATE) == CALL


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (" Hello ", Message("Hello")),
        ("", R.EMPTY),
        ("<think>\nhm\n</think>\n\nHello", Message("Hello")),
        ("<think>\nhm", R.UNCLOSED_REASONING),
        ("bad \udc00", R.ENCODING),
        ("You are being transferred", R.PROTOCOL),
    ],
)
def test_parse_reply_content_gives_its_message(content, expected):
    assert outcome(parse_reply(ChatReply(content, reasoning="never compared"), STATE)) == expected


def test_parse_reply_respects_what_is_allowed():
    silent = msgspec.structs.replace(STATE, allow_messages=False)
    idle = msgspec.structs.replace(STATE, allow_tool_calls=False)
    assert outcome(parse_reply(ChatReply("Hello"), silent)) == R.NOT_ALLOWED
    assert outcome(parse_reply(ChatReply("", (RawToolCall("now", "{}"),)), idle)) == R.NOT_ALLOWED
    assert outcome(parse_reply(ChatReply("", (RawToolCall("fly", "{}"),)), STATE)) == R.UNKNOWN_TOOL


# -- properties -----------------------------------------------------------------------------------

quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
texts = st.lists(st.text(max_size=12) | st.sampled_from([*CONTROL_TOKENS, "\ue000", "\ue001", "\\", '"'])).map("".join)
numbers = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
arguments_of_search = st.fixed_dictionaries(
    {"query": texts},
    optional={
        "limit": st.integers(-(2**70), 2**70),
        "price": numbers,
        "direct": st.booleans(),
        "tags": st.lists(texts, max_size=3),
        "filter": st.dictionaries(texts, values, max_size=3),
        "note": values,
    },
)


@quick
@given(arguments=arguments_of_search, thinking=st.booleans(), content=st.sampled_from(["", "I look it up."]))
def test_encode_response_any_conforming_call_survives_parsing(small_tokenizer, arguments, thinking, content):
    call = ToolCall("search", arguments)
    ids = small_tokenizer.encode_response("I need it.", content, [call], thinking)
    response = parse_response(ids, Finish.STOP, STATE, small_tokenizer, thinking)
    assert response.action == call
    assert response.message == ChatMessage(
        role="assistant", content=content, reasoning="I need it." if thinking else "", tool_calls=(call,)
    )


@quick
@given(data=st.data())
def test_parse_response_any_ids_never_raise(small_tokenizer, data):
    size = small_tokenizer.vocab_size
    control = st.sampled_from(sorted(small_tokenizer.control_ids))
    ids = data.draw(st.lists(st.integers(0, size - 1) | control | st.integers(-3, size + 3), max_size=30))
    finish = data.draw(st.sampled_from(list(Finish)))
    if data.draw(st.booleans()):
        ids.append(small_tokenizer.end_id)
    response = parse_response(ids, finish, STATE, small_tokenizer, data.draw(st.booleans()))
    assert (response.message is None) == isinstance(response.action, Invalid)
    msgspec.json.encode(response.action)


fragments = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        VALID,
        '{"name": "search", "arguments": ',
        "{",
        "}",
        "[",
        '"',
        ",",
        "\\ud800",
    ]
)


@quick
@given(text=st.lists(fragments | st.text(max_size=6) | values.map(json.dumps), max_size=10).map("".join))
def test_parsers_any_text_never_raises(respond, text):
    response = respond(text)
    teacher = parse_reply(ChatReply(text), STATE)
    assert isinstance(parse_reply(ChatReply(text, (RawToolCall("search", text),)), STATE), ToolCall | Invalid)
    if "<|" not in text and not isinstance(response.action, Invalid):
        assert teacher == response.action  # what a student may say, a teacher may


@quick
@given(text=st.text(alphabet=st.characters(codec=None), max_size=20))
def test_parse_reply_text_with_surrogates_never_raises(text):
    for action in (
        parse_reply(ChatReply(text), STATE),
        parse_reply(ChatReply(tagged(json.dumps({"name": text, text: 1}))), STATE),
        parse_reply(ChatReply(f"{tagged('{}' + text)}"), STATE),
        parse_reply(ChatReply("", (RawToolCall(text, text),)), STATE),
    ):
        msgspec.json.encode(action)
