import asyncio

import pytest

from actionopd_jax.environments.service_desk import ActJudge, acts, tools
from actionopd_jax.protocols import JudgeQuestion
from actionopd_jax.records import Match, Message, NoMatch, State, ToolCall

STATE = State("service_desk", (), tools.SPECS)


def verdict(one, two, evidence=None):
    return asyncio.run(ActJudge().judge(JudgeQuestion(STATE, one, two, None, (), evidence)))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("What is your email?", "Could you please send me the email of your account?"),
        ("Shall I cancel order W1001?", "I can cancel order w1001. Do you confirm?"),
        ("Shall I cancel order W1001?", "Do you want me to cancel W1001, yes or no?"),
        ("Shall I change your email to a.b@post.com?", "Please confirm: change your email address to a.b@post.com?"),
        ("I can not refund order W1001, it is shipped.", "Sorry, order W1001 is shipped, so we cannot refund it."),
        ("Done, order W1001 is cancelled. Anything else?", "I have cancelled W1001 for you."),
        ("Order W1001 cost 45 dollars.", "You paid 45 dollars for W1001. Is there anything else?"),
        ("Order W1001 goes to 12 Oak Street.", "We send W1001 to 12 oak street."),
        ("Okay, nothing is changed.", "Okay, I changed nothing. Is there anything else?"),
    ],
)
def test_messages_of_the_same_act_and_facts_match(one, two):
    assert isinstance(verdict(Message(one), Message(two)), Match)
    assert isinstance(verdict(Message(two), Message(one)), Match)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("What is your email?", "What is your order number?"),
        ("What is your email?", "What is the new email?"),
        ("Shall I cancel order W1001?", "Shall I cancel order W1002?"),
        ("Shall I cancel order W1001?", "Shall I refund order W1001?"),
        ("Shall I cancel order W1001?", "I cancelled order W1001."),
        ("Shall I change the address of W1001 to 12 Oak Street?", "Shall I change the address of W1001 to 13 Oak Street?"),
        ("Shall I exchange W1001 for a mug?", "Shall I exchange W1001 for a lamp?"),
        ("I can not refund order W1001, it is shipped.", "I can not refund order W1001, it is processing."),
        ("I can not refund order W1001, it is shipped.", "I can refund order W1001, it is shipped."),
        ("Order W1001 cost 45 dollars.", "Order W1001 cost 54 dollars."),
        ("Order W1001 is shipped.", "Order W1001 is not shipped."),
        ("Done, order W1001 is cancelled.", "Done, order W1001 is not cancelled."),
        ("Blue is a colour.", "Blue is a colour, yes."),  # nobody can tell
        ("", ""),
    ],
)
def test_messages_of_other_acts_or_facts_do_not_match(one, two):
    assert isinstance(verdict(Message(one), Message(two)), NoMatch)


def calls(name, one, two, evidence="own"):
    return verdict(ToolCall(name, one), ToolCall(name, two), tools.TOOLS[name].source if evidence == "own" else evidence)


@pytest.mark.parametrize(
    ("name", "one", "two"),
    [
        ("find_customer", {"email": "A@mail.com "}, {"email": "a@mail.com"}),
        ("get_order", {"order_id": "w1001"}, {"order_id": "W1001"}),
        ("change_address", {"order_id": "W1", "address": "12  oak street"}, {"order_id": "W1", "address": "12 Oak Street"}),
        ("apply_credit", {"order_id": "W1"}, {"order_id": "W1", "amount": 10}),
        ("update_email", {"email": "a@b.c", "new_email": "X@b.c"}, {"email": "A@b.c", "new_email": "x@b.c"}),
    ],
)
def test_calls_made_equal_by_the_source_match(name, one, two):
    assert isinstance(calls(name, one, two), Match)
    assert isinstance(calls(name, one, two, evidence=None), NoMatch)


@pytest.mark.parametrize(
    ("name", "one", "two"),
    [
        ("get_order", {"order_id": "W1001"}, {"order_id": "W1002"}),
        ("refund_order", {"order_id": "W1", "reason": "damaged"}, {"order_id": "W1", "reason": "unwanted"}),
        ("refund_order", {"order_id": "W1", "reason": "Damaged"}, {"order_id": "W1", "reason": "damaged"}),
        ("apply_credit", {"order_id": "W1"}, {"order_id": "W1", "amount": 20}),
        ("apply_credit", {"order_id": "W1", "amount": 1}, {"order_id": "W1", "amount": True}),
        ("update_email", {"email": "a@b.c", "new_email": "x@b.c"}, {"email": "x@b.c", "new_email": "a@b.c"}),
    ],
)
def test_calls_kept_apart_by_the_source_do_not_match(name, one, two):
    assert isinstance(calls(name, one, two), NoMatch)


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("def f(db, x):\n    x = x.lower()\n    return x", True),
        ("def f(db, x):\n    return x", False),
        ("def f(db, x):\n    y = x.lower()\n    return x", False),
        ("def f(db, x):\n    x = str(x).lower()\n    return x", False),
        ("def f(db, x):\n    if x:\n        x = x.lower()\n    return x", False),
        ("def f(", False),
        ("", False),
    ],
)
def test_source_justifies_only_a_leading_normalisation_of_the_argument(source, match):
    outcome = verdict(ToolCall("f", {"x": "A"}), ToolCall("f", {"x": "a"}), source)
    assert isinstance(outcome, Match) == match


def test_different_kinds_and_tools_do_not_match():
    assert isinstance(verdict(Message("Done."), ToolCall("escalate", {})), NoMatch)
    assert isinstance(verdict(ToolCall("get_order", {}), ToolCall("escalate", {}), ""), NoMatch)


@pytest.mark.parametrize(
    ("text", "kind", "topics"),
    [
        ("May I have your email address?", "ask", {"email"}),
        ("Which item do you want instead?", "ask", {"item"}),
        ("What is your email or order number?", "ask", {"email", "order"}),
        ("Please confirm your email.", "ask", {"email"}),
        ("Goodbye, have a nice day!", "close", set()),
        ("How can I help you?", "offer", set()),
        ("Should I go ahead and refund order number W1001?", "confirm", {"refund"}),
        ("Asdf.", "other", set()),
    ],
)
def test_read_recognises_the_act(text, kind, topics):
    act = acts.read(text)
    assert (act.kind, set(act.topics)) == (kind, topics)
