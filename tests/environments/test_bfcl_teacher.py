"""Ground-truth teacher and turn-end judge: what they answer at hand-made states."""

import asyncio
import json

import jsonschema
import pytest

pytest.importorskip("bfcl_eval")

from actionopd_jax.environments.bfcl import BfclSuite, data
from actionopd_jax.environments.bfcl.calls import canonical, literal_fault, parse_call
from actionopd_jax.environments.bfcl.schemas import json_schema
from actionopd_jax.environments.bfcl.teacher import TURN_BLOCKED, TURN_DONE, TurnEndJudge, next_action
from actionopd_jax.errors import ConfigError
from actionopd_jax.protocols import ChatModel, ChatRequest, JudgeQuestion
from actionopd_jax.records import ChatMessage, Match, Message, NoMatch, State, Task, ToolCall, Unavailable

# The first turn of multi_turn_base_0, read by hand from the package's answer file.
CD = ToolCall("cd", {"folder": "document"})
MKDIR = ToolCall("mkdir", {"dir_name": "temp"})
MV = ToolCall("mv", {"source": "final_report.pdf", "destination": "temp"})


@pytest.fixture(scope="module")
def entry():
    return data.category_entries("base")[0]


def user(text):
    return ChatMessage("user", text)


def called(*calls):
    return tuple(
        message
        for call in calls
        for message in (ChatMessage("assistant", "", tool_calls=(call,)), ChatMessage("tool", "{}"))
    )


def state(*messages):
    return State("bfcl", (ChatMessage("system", "s"), *messages), ())


def test_teacher_answers_with_calls_in_order_then_ends_the_turn(entry):
    asked = user(entry.turns[0])
    assert next_action(entry, state(asked)) == CD
    assert next_action(entry, state(asked, *called(CD))) == MKDIR
    assert next_action(entry, state(asked, *called(CD, MKDIR))) == MV
    assert next_action(entry, state(asked, *called(CD, MKDIR, MV))) == Message(TURN_DONE)


def test_teacher_passes_over_other_calls_and_other_order(entry):
    asked = user(entry.turns[0])
    assert next_action(entry, state(asked, *called(ToolCall("pwd", {}), MKDIR))) == CD
    assert next_action(entry, state(asked, *called(MKDIR, CD, ToolCall("ls", {})))) == MV


def test_teacher_counts_calls_of_the_current_turn_only(entry):
    first, second = user(entry.turns[0]), user(entry.turns[1])
    seen = state(first, *called(CD, MKDIR, MV), ChatMessage("assistant", "ok"), second)
    assert next_action(entry, seen) == entry.calls[1][0] == ToolCall("cd", {"folder": "temp"})


def test_teacher_finds_the_turn_when_earlier_ones_were_dropped(entry):
    last = len(entry.turns) - 1
    assert next_action(entry, state(user(entry.turns[0]), user(entry.turns[last]))) == entry.calls[last][0]


def test_teacher_foreign_state_is_a_config_error(entry):
    with pytest.raises(ConfigError, match="multi_turn_base_0"):
        next_action(entry, state(user("something else")))


def test_teacher_without_possible_action_says_so():
    blocked = next(e for e in data.category_entries("miss_param") if () in e.calls)
    turn = blocked.calls.index(())
    assert next_action(blocked, state(*(user(text) for text in blocked.turns[: turn + 1]))) == Message(TURN_BLOCKED)


def test_teacher_recognises_a_call_that_spells_out_a_default():
    withheld = data.category_entries("miss_func")[1]  # first turn: ls(a=True)
    asked = user(withheld.turns[0])
    assert next_action(withheld, state(asked, *called(ToolCall("ls", {"a": False})))) == ToolCall("ls", {"a": True})
    trading = next(e for e in data.category_entries("base") if any(c.arguments == {} for c in e.calls[0]))
    call = next(c for c in trading.calls[0] if c.arguments == {})
    defaults = dict(trading.tools[call.name].defaults)
    made = [ToolCall(c.name, defaults) if c is call else c for c in trading.calls[0]]
    assert isinstance(next_action(trading, state(user(trading.turns[0]), *called(*made))), Message)


def test_teacher_replies_as_a_chat_model_and_depends_on_seed_and_draw():
    suite = BfclSuite({})
    task = Task("bfcl", "base", "multi_turn_base_0")
    observation = suite.make(task).reset()
    seen = State("bfcl", observation.messages, observation.tools)
    teacher = suite.scripted_teacher(7, {"invalid_rate": 0.5})
    assert isinstance(teacher, ChatModel)
    assert teacher.depends_on_task
    assert suite.version in teacher.identity

    def replies(model):
        return [asyncio.run(model.complete(ChatRequest(state=seen, task=task, draw=(k, 0)))) for k in range(40)]

    broken = [reply for reply in replies(teacher) if reply.tool_calls[0].arguments == "{"]
    assert 8 <= len(broken) <= 32
    assert replies(teacher) == replies(suite.scripted_teacher(7, {"invalid_rate": 0.5}))
    valid = [reply for reply in replies(suite.scripted_teacher(7, {})) if json.loads(reply.tool_calls[0].arguments)]
    assert len(valid) == 40
    with pytest.raises(ConfigError, match="invalid_rate"):
        suite.scripted_teacher(0, {"invalid_rate": 1.5})


EVIDENCE = 'def tool(self, a: str, b: int = 3, tags: list = []) -> dict:\n    """Doc."""\n    return {}\n'


@pytest.mark.parametrize(
    ("action", "expected", "evidence", "verdict"),
    [
        (Message("bye"), Message("anything else?"), None, Match),
        (Message("bye"), ToolCall("tool", {"a": "x"}), EVIDENCE, NoMatch),
        (ToolCall("other", {"a": "x"}), ToolCall("tool", {"a": "x"}), EVIDENCE, NoMatch),
        (ToolCall("tool", {"a": "x", "b": 3}), ToolCall("tool", {"a": "x"}), EVIDENCE, Match),
        (ToolCall("tool", {"a": "x", "tags": []}), ToolCall("tool", {"a": "x", "b": 3.0}), EVIDENCE, Match),
        (ToolCall("tool", {"a": "x", "b": 4}), ToolCall("tool", {"a": "x"}), EVIDENCE, NoMatch),
        (ToolCall("tool", {"a": "x", "b": None}), ToolCall("tool", {"a": "x"}), EVIDENCE, NoMatch),
        (ToolCall("tool", {"a": "x "}), ToolCall("tool", {"a": "x"}), EVIDENCE, NoMatch),
        (ToolCall("tool", {"a": "x", "b": 3}), ToolCall("tool", {"a": "x"}), "not ( python", NoMatch),
        (ToolCall("tool", {"a": "x", "b": 3}), ToolCall("tool", {"a": "x"}), None, Unavailable),
    ],
)
def test_judge_verdict(action, expected, evidence, verdict):
    question = JudgeQuestion(
        state=state(), action=action, teacher_action=expected, tool=None, differing_paths=(), evidence=evidence
    )
    answer = asyncio.run(TurnEndJudge().judge(question))
    assert isinstance(answer, verdict)
    assert answer.source == "bfcl-turn-end-v1"


def test_judge_reads_defaults_from_real_evidence():
    suite = BfclSuite({})
    env = suite.make(Task("bfcl", "base", "multi_turn_base_0"))
    question = JudgeQuestion(
        state=state(),
        action=ToolCall("tail", {"file_name": "f", "lines": 10}),
        teacher_action=ToolCall("tail", {"file_name": "f"}),
        tool=None,
        differing_paths=("lines",),
        evidence=env.evidence("tail"),
    )
    assert isinstance(asyncio.run(suite.judge().judge(question)), Match)


def test_parse_call_names_positional_arguments():
    parameters = {"f": ("a", "b")}
    assert parse_call("f(1, b=['x', -2.5])", parameters) == ToolCall("f", {"a": 1, "b": ["x", -2.5]})
    for text in ("f(a=open('x'))", "f(1, a=2)", "f(1,2,3)", "g()", "f", "f(c=1)", "m.f(1)", "f(**{'a': 1})", "f(1"):
        with pytest.raises(ConfigError):
            parse_call(text, parameters)


def test_canonical_fills_defaults_and_keeps_booleans_apart_from_numbers():
    assert canonical({"b": 2.0}, {"a": []}) == canonical({"a": [], "b": 2}, {"a": [1]})
    assert canonical({"a": True}, {}) != canonical({"a": 1}, {})
    assert canonical({"a": [1, 2]}, {}) != canonical({"a": [2, 1]}, {})


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), 2**5000, (1,), {1: 2}, [{"a": {1}}], eval("[" * 20 + "]" * 20)]
)
def test_literal_fault_refuses(value):
    assert literal_fault(value) is not None


def test_literal_fault_admits_json_values():
    assert literal_fault({"a": [1, -2.5, "x", None, True, {"b": []}]}) is None


def test_json_schema_converts_the_packages_types():
    document = {
        "type": "dict",
        "properties": {
            "a": {"type": "float", "description": " number ", "default": "None"},
            "b": {"type": "tuple", "items": {"type": "any"}},
            "c": {"type": "integer", "default": 0},
        },
        "required": ["b"],
    }
    assert json_schema(document) == {
        "type": "object",
        "properties": {
            "a": {"type": "number", "description": "number"},
            "b": {"type": "array", "items": {}},
            "c": {"type": "integer", "default": 0},
        },
        "required": ["b"],
    }


def test_ground_truths_conform_to_the_tools_schemas():
    tools = {name: tool for entry in data.category_entries("base") for name, tool in entry.tools.items()}
    validators = {name: jsonschema.Draft202012Validator(tool.spec.parameters) for name, tool in tools.items()}
    calls = {
        (call.name, json.dumps(call.arguments)): call
        for category in data.CATEGORIES
        for entry in data.category_entries(category)
        for turn in entry.calls
        for call in turn
    }
    for call in calls.values():
        validators[call.name].validate(call.arguments)
    assert set(validators) >= {name for name, _ in calls}
