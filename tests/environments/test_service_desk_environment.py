import pytest

from actionopd_jax.environments.service_desk import ServiceDesk, ServiceDeskSuite, policy, tools, world
from actionopd_jax.records import End, Message, Observation, ToolCall

MIA = world.Person("mia.lopez@mail.com", "Mia Lopez", "gold")
LAMP = world.Order("W1001", MIA.email, "lamp", 45, "processing", 3, "12 Oak Street")
MUG = world.Order("W1002", MIA.email, "mug", 9, "shipped", 4, "12 Oak Street")
BAG = world.Order("W1003", MIA.email, "bag", 30, "delivered", 70, "5 Mill Lane")
SUITE = ServiceDeskSuite()


def desk(*requests, knows_order=True, opens_with="", gives_detail=True):
    return ServiceDesk(world.Scenario(5, (MIA,), (LAMP, MUG, BAG), MIA, requests, knows_order, opens_with, gives_detail))


def cancel(outcome="change"):
    return world.Request("cancel", LAMP, "gold", "", outcome)


def play(environment, *actions):
    """The customer's lines, None for the end."""
    environment.reset()
    lines = []
    for action in actions:
        seen = environment.step(Message(action) if isinstance(action, str) else action)
        lines.append(None if isinstance(seen, End) else seen.messages[0].content)
    return lines


CANCEL = ToolCall("cancel_order", {"order_id": "W1001"})


def test_confirmed_cancellation_succeeds():
    environment = desk(cancel())
    lines = play(environment, "Shall I cancel order W1001?", CANCEL, "Order W1001 is cancelled. Anything else?")
    assert lines[0].startswith("Yes")
    assert lines[1:] == ['{"status":"cancelled"}', None]
    assert environment.score().success
    environment.close()
    assert environment.score().success  # the score outlives the database
    environment.close()


def test_unconfirmed_change_fails_though_the_database_is_right():
    environment = desk(cancel())
    play(environment, CANCEL, "Done, order W1001 is cancelled.")
    score = environment.score()
    assert not score.success
    assert score.details == {"failed": ["confirmed"]}
    assert score.partial == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    "proposal", ["Shall I refund order W1001?", "Shall I cancel order W1002?", "Do you want me to never cancel order W1001?"]
)
def test_wrong_proposal_is_rejected_and_gives_no_consent(proposal):
    environment = desk(cancel())
    lines = play(environment, proposal)
    assert all("wrong" in line for line in lines)
    environment.step(CANCEL)
    assert "confirmed" in environment.score().details["failed"]


def test_declined_change_must_stay_undone():
    environment = desk(cancel("decline"))
    lines = play(environment, "Shall I cancel order W1001?", "Okay, nothing is changed. Anything else?")
    assert lines[0].startswith("No")
    assert lines[1] is None
    assert environment.score().success
    stubborn = desk(cancel("decline"))
    play(stubborn, "Shall I cancel order W1001?", CANCEL, "Done, order W1001 is cancelled.")
    assert stubborn.score().details["failed"] == ["database", "confirmed", "request_1"]


@pytest.mark.parametrize(
    ("message", "success"),
    [
        ("I can not cancel order W1002, it is shipped.", True),
        ("Unfortunately order W1002 was shipped already, so it can't be cancelled.", True),
        ("I can not cancel order W1002.", False),  # no reason
        ("I can not cancel order W1002, it is delivered.", False),  # false reason
        ("I can not cancel order W1003, it is shipped.", False),  # another order
        ("I can not refund order W1002, it is shipped.", False),  # another request
    ],
)
def test_refusal_must_name_the_request_and_the_true_reason(message, success):
    environment = desk(world.Request("cancel", MUG, "gold", "", "refuse", "status"))
    assert play(environment, message) == [None]
    assert environment.score().success == success


@pytest.mark.parametrize(
    ("topic", "message", "right"),
    [
        ("status", "It is shipped.", True),
        ("status", "It is delivered.", False),
        ("price", "You paid 9 dollars.", True),
        ("price", "You paid 19 dollars.", False),
        ("where", "We send it to 12 Oak Street.", True),
        ("days", "Order W1002 was shipped 4 days ago.", True),
        ("days", "Order W1002 was shipped 5 days ago.", False),
    ],
)
def test_information_must_have_the_asked_value(topic, message, right):
    environment = desk(world.Request("info", MUG, "gold", topic, "inform"))
    lines = play(environment, message)
    assert (lines == [None]) == right
    assert environment.score().success == right


def test_customer_tells_a_fact_only_when_asked():
    request = world.Request("refund", BAG, "gold", "damaged", "change")
    environment = desk(request, gives_detail=False)
    opening = environment.reset().messages[1].content
    assert "W1003" not in opening
    assert "damaged" not in opening
    lines = [
        environment.step(Message(m)).messages[0].content
        for m in ("What is the reason?", "Your order number?", "Your email?")
    ]
    assert "damaged" in lines[0]
    assert "W1003" in lines[1]
    assert MIA.email in lines[2]


def test_customer_without_the_number_gives_the_email():
    environment = desk(cancel(), knows_order=False)
    assert MIA.email in play(environment, "Please tell me your order number.")[0]


def test_second_request_comes_after_the_first_is_answered():
    environment = desk(world.Request("info", MUG, "gold", "status", "inform"), cancel())
    line = play(environment, "Order W1002 is shipped. Anything else?")[0]
    assert "Also, " in line
    assert "W1001" in line
    assert not environment.score().success


def test_customer_leaves_after_three_useless_messages():
    environment = desk(cancel())
    lines = play(environment, "Nice weather.", "How can I help you?", "Anything else?")
    assert lines[2] is None
    assert None not in lines[:2]
    score = environment.score()
    assert score.details["failed"] == ["database", "request_1"]


def test_false_report_does_not_satisfy_the_customer():
    line = play(desk(cancel()), "Done, order W1001 is cancelled.")[0]
    assert "lamp" in line


def test_student_mistakes_are_observations():
    environment = desk(cancel())
    lines = play(environment, ToolCall("cancel_order", {"order_id": "W1"}), ToolCall("nothing", {}), "", "?" * 5000)
    assert lines[:2] == ['{"error":"unknown order"}', '{"error":"unknown tool"}']
    assert isinstance(lines[2], str)


def test_reset_shows_policy_tools_and_both_kinds_of_action():
    observation = desk(cancel()).reset()
    assert isinstance(observation, Observation)
    assert observation.messages[0].content == policy.SYSTEM
    assert observation.tools == tools.SPECS
    assert observation.allow_messages
    assert observation.allow_tool_calls


def test_evidence_is_the_source_of_the_tool():
    environment = desk(cancel())
    assert "UPDATE orders SET status = 'cancelled'" in environment.evidence("cancel_order")
    assert environment.evidence("nothing") is None


@pytest.mark.parametrize(
    "lines", [(), ("Anything else?",) * 3, ("What is your email?",) * 4, ("Okay, nothing is changed.",) * 3]
)
def test_idle_agent_succeeds_on_no_task(lines):
    for task in (*SUITE.tasks("train")[:200], *SUITE.tasks("heldout")[:100]):
        environment = SUITE.make(task)
        play(environment, *lines)
        assert not environment.score().success, task
        environment.close()
