import json

import jsonschema
import pytest

from actionopd_jax.environments.service_desk import tools, world
from actionopd_jax.records import ToolCall

MIA = world.Person("mia.lopez@mail.com", "Mia Lopez", "gold")
LEO = world.Person("leo.smith@mail.com", "Leo Smith", "basic")
ORDERS = (
    world.Order("W1001", MIA.email, "lamp", 45, "processing", 3, "12 Oak Street"),
    world.Order("W1002", MIA.email, "mug", 9, "shipped", 12, "12 Oak Street"),
    world.Order("W1003", LEO.email, "bag", 30, "delivered", 8, "5 Mill Lane"),
)


@pytest.fixture
def db():
    scenario = world.Scenario(0, (MIA, LEO), ORDERS, MIA, (), False, "", True)
    connection = scenario.database()
    yield connection
    connection.close()


def run(db, name, **arguments):
    return tools.execute(db, ToolCall(name, arguments))


def test_find_customer_gives_orders_whatever_the_case_of_the_email(db):
    assert run(db, "find_customer", email=" MIA.Lopez@mail.com") == {
        "name": "Mia Lopez",
        "tier": "gold",
        "orders": [{"item": "lamp", "order_id": "W1001"}, {"item": "mug", "order_id": "W1002"}],
    }


def test_get_order_gives_the_row_with_the_tier(db):
    assert run(db, "get_order", order_id="w1003") == {
        "item": "bag",
        "price": 30,
        "status": "delivered",
        "days": 8,
        "address": "5 Mill Lane",
        "tier": "basic",
    }


@pytest.mark.parametrize(
    ("name", "arguments", "result", "column", "value"),
    [
        ("cancel_order", {"order_id": "W1001"}, {"status": "cancelled"}, "status", "cancelled"),
        (
            "change_address",
            {"order_id": "W1001", "address": "7  lake road"},
            {"address": "7 Lake Road"},
            "address",
            "7 Lake Road",
        ),
        ("refund_order", {"order_id": "W1003", "reason": "damaged"}, {"status": "refunded"}, "reason", "damaged"),
        ("exchange_item", {"order_id": "W1003", "item": "Desk"}, {"status": "exchanged", "item": "desk"}, "item", "desk"),
        ("apply_credit", {"order_id": "W1002", "amount": 20}, {"credit": 20}, "credit", 20),
        ("apply_credit", {"order_id": "W1002"}, {"credit": 10}, "credit", 10),
    ],
)
def test_change_in_the_right_state_changes_only_its_order(db, name, arguments, result, column, value):
    before = {row[0]: row for row in db.execute("SELECT * FROM orders")}
    assert run(db, name, **arguments) == result
    changed = [row[0] for row in db.execute("SELECT * FROM orders") if row != before[row[0]]]
    assert changed == [arguments["order_id"]]
    assert db.execute(f"SELECT {column} FROM orders WHERE order_id = ?", changed).fetchone() == (value,)


@pytest.mark.parametrize(
    ("name", "arguments", "error"),
    [
        ("find_customer", {"email": "nobody@mail.com"}, "unknown email"),
        ("get_order", {"order_id": "W9999"}, "unknown order"),
        ("cancel_order", {"order_id": "W1002"}, "order is shipped"),
        ("cancel_order", {"order_id": "W9999"}, "unknown order"),
        ("change_address", {"order_id": "W1003", "address": "1 Oak Street"}, "order is delivered"),
        ("refund_order", {"order_id": "W1001", "reason": "damaged"}, "order is processing"),
        ("refund_order", {"order_id": "W1003", "reason": "bored"}, "reason is not allowed"),
        ("exchange_item", {"order_id": "W1002", "item": "mug"}, "order is shipped"),
        ("apply_credit", {"order_id": "W1001", "amount": 10}, "order is processing"),
        ("apply_credit", {"order_id": "W1002", "amount": 10**30}, "amount is not allowed"),
        ("apply_credit", {"order_id": "W1002", "amount": True}, "amount is not a integer"),
        ("update_email", {"email": MIA.email, "new_email": LEO.email}, "email is taken"),
        ("update_email", {"email": "x@mail.com", "new_email": "y@mail.com"}, "unknown email"),
        ("escalate", {"order_id": "W1001"}, "topic is missing"),
        ("escalate", {"order_id": "W9999", "topic": "fraud"}, "unknown order"),
        ("cancel_order", {"order_id": "W1001", "force": True}, "force is unknown"),
        ("cancel_order", {"order_id": 1001}, "order_id is not a string"),
        ("cancel_order", {"order_id": "W1\ud800"}, "order_id is not plain text"),
        ("drop_table", {}, "unknown tool"),
    ],
)
def test_mistake_is_an_error_result_and_changes_nothing(db, name, arguments, error):
    before = world.snapshot(db)
    assert run(db, name, **arguments) == {"error": error}
    assert world.snapshot(db) == before


def test_apply_credit_twice_is_refused(db):
    run(db, "apply_credit", order_id="W1002")
    assert run(db, "apply_credit", order_id="W1002") == {"error": "order has a credit"}


def test_update_email_moves_the_orders_along(db):
    assert run(db, "update_email", email=MIA.email, new_email="Mia@post.com") == {"email": "mia@post.com"}
    orders = run(db, "find_customer", email="mia@post.com")["orders"]
    assert [(order["item"], order["order_id"]) for order in orders] == [("lamp", "W1001"), ("mug", "W1002")]
    assert run(db, "find_customer", email=MIA.email) == {"error": "unknown email"}


def test_escalate_twice_leaves_one_ticket(db):
    for _ in range(2):
        assert run(db, "escalate", order_id="W1003", topic="safety") == {"ticket": "safety"}
    assert db.execute("SELECT * FROM tickets").fetchall() == [("W1003", "safety")]


def test_specs_are_json_schemas_that_name_the_functions_parameters():
    assert 8 <= len(tools.SPECS) <= 11
    for spec in tools.SPECS:
        jsonschema.Draft202012Validator.check_schema(spec.parameters)
        assert list(spec.parameters["properties"]) == list(tools.TOOLS[spec.name].signature.parameters)[1:]
        assert f"def {spec.name}(" in tools.TOOLS[spec.name].source


def test_observation_text_is_one_short_line_in_the_tools_order(db):
    text = tools.observation_text(run(db, "get_order", order_id="W1001"))
    assert text.startswith('{"item":"lamp","price":45')
    assert "\n" not in text
    assert json.loads(text)["address"] == "12 Oak Street"
