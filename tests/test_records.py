import hashlib
import json
import pickle

import msgspec
import numpy as np
import pytest

from actionopd_jax.records import (
    Candidate,
    ChatMessage,
    ChatReply,
    EndReason,
    Example,
    Finish,
    Invalid,
    InvalidReason,
    Match,
    Message,
    NoMatch,
    Score,
    State,
    StateGroup,
    Task,
    TeacherSample,
    ToolCall,
    ToolSpec,
    Trajectory,
    Unavailable,
    digest,
    encode,
)


def _candidate(reward):
    return Candidate(
        ids=(1, 2),
        behaviour_logprobs=(-0.5, -0.25),
        finish=Finish.STOP,
        action=ToolCall("find", {"n": 1, "deep": {"b": [1, None, True, 1.5]}}),
        verdicts=(Match("canonical"), NoMatch("judge", "other city"), Unavailable("judge", "timeout")),
        match_count=1,
        reward=reward,
    )


def _group(*rewards):
    candidates = tuple(map(_candidate, rewards))
    teacher = (
        TeacherSample(Message("hi"), 2, ChatReply("hi")),
        TeacherSample(ToolCall("find", {}), 1, ChatReply("", reasoning="r")),
    )
    return StateGroup(0, "key", (5, 6), teacher, candidates, 0, 3)


def _state(**changes):
    values = {
        "environment": "e",
        "messages": (ChatMessage("user", "hello"), ChatMessage("assistant", "", tool_calls=(ToolCall("find", {"n": 1}),))),
        "tools": (ToolSpec("find", "finds", {"type": "object", "properties": {"n": {"type": "integer"}}}),),
    }
    return State(**{**values, **changes})


def test_trajectory_encoded_and_decoded_is_equal():
    invalid = msgspec.structs.replace(_candidate(-1.0), action=Invalid(InvalidReason.LENGTH, "cut"), finish=Finish.LENGTH)
    group = msgspec.structs.replace(_group(1.25, None), candidates=(_candidate(1.25), _candidate(None), invalid))
    trajectory = Trajectory(4, 2, Task("e", "train", "7"), (group,), EndReason.DONE, "", Score(True, 1.0, {"a": 1}), 3, 0.5)
    assert msgspec.json.decode(encode(trajectory), type=Trajectory) == trajectory


def test_decode_unknown_field_or_wrong_type_refuses():
    for content in (b'{"environment":"e","split":"s","task_id":"1","x":1}', b'{"environment":"e","split":"s","task_id":1}'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(content, type=Task)


def test_records_are_immutable():
    with pytest.raises(AttributeError):
        Task("e", "s", "1").task_id = "2"


def test_state_key_is_the_digest_of_what_is_visible():
    state = _state()
    assert state.key == _state().key
    assert state.key == hashlib.sha256(encode(_state())).hexdigest()
    assert "key" not in json.loads(encode(state))  # the cached key does not enter a later digest
    assert digest(state) == state.key
    assert pickle.loads(pickle.dumps(state)).key == state.key


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": "f"},
        {"messages": (ChatMessage("user", "hello"),)},
        {"messages": (ChatMessage("user", "hello"), ChatMessage("assistant", "", tool_calls=(ToolCall("find", {"n": 2}),)))},
        {
            "messages": (
                ChatMessage("user", "hello"),
                ChatMessage("assistant", "", tool_calls=(ToolCall("find", {"n": True}),)),
            )
        },
        {
            "messages": (
                ChatMessage("user", "hello"),
                ChatMessage("assistant", "", tool_calls=(ToolCall("find", {"n": "1"}),)),
            )
        },
        {
            "messages": (
                ChatMessage("user", "hello"),
                ChatMessage("assistant", "", reasoning="r", tool_calls=(ToolCall("find", {"n": 1}),)),
            )
        },
        {"tools": ()},
        {"allow_messages": False},
        {"allow_tool_calls": False},
    ],
)
def test_state_key_changes_with_anything_visible(changes):
    assert _state(**changes).key != _state().key


def test_digest_order_of_object_keys_does_not_count():
    assert digest({"a": 1, "b": {"c": 2, "d": 3}}) == digest({"b": {"d": 3, "c": 2}, "a": 1})
    assert digest([1, 2]) != digest([2, 1])
    assert len({digest(value) for value in (1, 1.0, True, "1", None, [1])}) == 6


def test_state_group_with_any_reward_missing_is_unsupervised():
    assert _group(1.0, 0.0, -1.0).supervised
    assert not _group(1.0, None).supervised


def test_task_key_names_environment_split_and_id():
    assert Task("bfcl", "train", "multi_turn_3").key == "bfcl/train/multi_turn_3"


@pytest.mark.parametrize(("prompt", "response", "weights"), [(2, 3, 2), (0, 2, 2), (2, 0, 0)])
def test_example_of_wrong_lengths_refuses(prompt, response, weights):
    with pytest.raises(ValueError, match="in group g"):
        Example(np.ones(prompt, np.int32), np.ones(response, np.int32), np.ones(weights, np.float32), "g", "t")
