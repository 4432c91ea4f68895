"""The tools: plain functions over SQLite, whose source is what the matcher may read as evidence.

A mistake of the caller is a result with an `error`, never an exception.
"""

import dataclasses
import functools
import inspect
import sqlite3
from collections.abc import Callable

import msgspec

from actionopd_jax.records import JsonObject, ToolCall, ToolSpec


def find_customer(db: sqlite3.Connection, email: str) -> JsonObject:
    email = email.strip().lower()
    row = db.execute("SELECT name, tier FROM customers WHERE email = ?", (email,)).fetchone()
    if row is None:
        return {"error": "unknown email"}
    orders = db.execute("SELECT item, order_id FROM orders WHERE email = ? ORDER BY order_id", (email,))
    return {"name": row[0], "tier": row[1], "orders": [{"item": item, "order_id": number} for item, number in orders]}


def get_order(db: sqlite3.Connection, order_id: str) -> JsonObject:
    order_id = order_id.strip().upper()
    row = db.execute(
        "SELECT item, price, status, days, address, tier FROM orders JOIN customers USING (email) WHERE order_id = ?",
        (order_id,),
    ).fetchone()
    if row is None:
        return {"error": "unknown order"}
    return dict(zip(("item", "price", "status", "days", "address", "tier"), row, strict=True))


def cancel_order(db: sqlite3.Connection, order_id: str) -> JsonObject:
    order_id = order_id.strip().upper()
    row = db.execute("SELECT status FROM orders WHERE order_id = ?", (order_id,)).fetchone()
    if row is None:
        return {"error": "unknown order"}
    if row[0] != "processing":
        return {"error": f"order is {row[0]}"}
    db.execute("UPDATE orders SET status = 'cancelled' WHERE order_id = ?", (order_id,))
    return {"status": "cancelled"}


def change_address(db: sqlite3.Connection, order_id: str, address: str) -> JsonObject:
    order_id = order_id.strip().upper()
    address = " ".join(address.split()).title()
    row = db.execute("SELECT status FROM orders WHERE order_id = ?", (order_id,)).fetchone()
    if row is None:
        return {"error": "unknown order"}
    if row[0] != "processing":
        return {"error": f"order is {row[0]}"}
    db.execute("UPDATE orders SET address = ? WHERE order_id = ?", (address, order_id))
    return {"address": address}


def refund_order(db: sqlite3.Connection, order_id: str, reason: str) -> JsonObject:
    order_id = order_id.strip().upper()
    row = db.execute("SELECT status FROM orders WHERE order_id = ?", (order_id,)).fetchone()
    if row is None:
        return {"error": "unknown order"}
    if row[0] != "delivered":
        return {"error": f"order is {row[0]}"}
    db.execute("UPDATE orders SET status = 'refunded', reason = ? WHERE order_id = ?", (reason, order_id))
    return {"status": "refunded"}


def exchange_item(db: sqlite3.Connection, order_id: str, item: str) -> JsonObject:
    order_id = order_id.strip().upper()
    item = item.strip().lower()
    row = db.execute("SELECT status FROM orders WHERE order_id = ?", (order_id,)).fetchone()
    if row is None:
        return {"error": "unknown order"}
    if row[0] != "delivered":
        return {"error": f"order is {row[0]}"}
    db.execute("UPDATE orders SET status = 'exchanged', item = ? WHERE order_id = ?", (item, order_id))
    return {"status": "exchanged", "item": item}


def apply_credit(db: sqlite3.Connection, order_id: str, amount: int = 10) -> JsonObject:
    order_id = order_id.strip().upper()
    if amount not in (10, 20):
        return {"error": "amount is not allowed"}
    row = db.execute("SELECT status, credit FROM orders WHERE order_id = ?", (order_id,)).fetchone()
    if row is None:
        return {"error": "unknown order"}
    if row[0] != "shipped":
        return {"error": f"order is {row[0]}"}
    if row[1]:
        return {"error": "order has a credit"}
    db.execute("UPDATE orders SET credit = ? WHERE order_id = ?", (amount, order_id))
    return {"credit": amount}


def update_email(db: sqlite3.Connection, email: str, new_email: str) -> JsonObject:
    email = email.strip().lower()
    new_email = new_email.strip().lower()
    if db.execute("SELECT 1 FROM customers WHERE email = ?", (email,)).fetchone() is None:
        return {"error": "unknown email"}
    if db.execute("SELECT 1 FROM customers WHERE email = ?", (new_email,)).fetchone() is not None:
        return {"error": "email is taken"}
    db.execute("UPDATE customers SET email = ? WHERE email = ?", (new_email, email))
    db.execute("UPDATE orders SET email = ? WHERE email = ?", (new_email, email))
    return {"email": new_email}


def escalate(db: sqlite3.Connection, order_id: str, topic: str) -> JsonObject:
    order_id = order_id.strip().upper()
    if db.execute("SELECT 1 FROM orders WHERE order_id = ?", (order_id,)).fetchone() is None:
        return {"error": "unknown order"}
    db.execute("INSERT OR IGNORE INTO tickets VALUES (?, ?)", (order_id, topic))
    return {"ticket": topic}


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool's function and what the student sees of it."""

    function: Callable[..., JsonObject]
    spec: ToolSpec

    @functools.cached_property
    def source(self) -> str:
        return inspect.getsource(self.function)

    @functools.cached_property
    def signature(self) -> inspect.Signature:
        return inspect.signature(self.function)


_STRING: JsonObject = {"type": "string"}
_TYPES = {"string": str, "integer": int}


def _tool(function: Callable[..., JsonObject], description: str, **properties: JsonObject) -> Tool:
    defaults = inspect.signature(function).parameters
    required = [name for name in properties if defaults[name].default is inspect.Parameter.empty]
    parameters: JsonObject = {"type": "object", "properties": properties, "required": required}
    return Tool(function, ToolSpec(function.__name__, description, parameters))


TOOLS: dict[str, Tool] = {
    tool.spec.name: tool
    for tool in (
        _tool(find_customer, "Find a customer.", email=_STRING),
        _tool(get_order, "Look up an order.", order_id=_STRING),
        _tool(cancel_order, "Cancel an order.", order_id=_STRING),
        _tool(change_address, "Change the address.", order_id=_STRING, address=_STRING),
        _tool(refund_order, "Refund.", order_id=_STRING, reason={"enum": ["damaged", "wrong item", "unwanted"]}),
        _tool(exchange_item, "Exchange the item.", order_id=_STRING, item=_STRING),
        _tool(apply_credit, "Give credit.", order_id=_STRING, amount={"type": "integer"}),
        _tool(update_email, "Change the email.", email=_STRING, new_email=_STRING),
        _tool(escalate, "Escalate.", order_id=_STRING, topic={"enum": ["safety", "fraud"]}),
    )
}
"""All tools by name; the schemas that the student sees are made from this table."""

SPECS = tuple(tool.spec for tool in TOOLS.values())


def _complaint(tool: Tool, arguments: JsonObject) -> str:
    properties = tool.spec.parameters["properties"]
    for name in tool.spec.parameters["required"]:
        if name not in arguments:
            return f"{name} is missing"
    for name, value in arguments.items():
        schema = properties.get(name)
        if schema is None:
            return f"{name} is unknown"
        if "enum" in schema:
            if value not in schema["enum"]:
                return f"{name} is not allowed"
        elif not isinstance(value, _TYPES[schema["type"]]) or isinstance(value, bool):
            return f"{name} is not a {schema['type']}"
        if isinstance(value, str) and not value.isprintable():
            return f"{name} is not plain text"
    return ""


def execute(db: sqlite3.Connection, call: ToolCall) -> JsonObject:
    """Runs a call; whatever is wrong with it comes back as `{"error": ...}`."""
    tool = TOOLS.get(call.name)
    if tool is None:
        return {"error": "unknown tool"}
    complaint = _complaint(tool, call.arguments)
    return {"error": complaint} if complaint else tool.function(db, **call.arguments)


def observation_text(result: JsonObject) -> str:
    """One line of compact JSON, keys in the tool's own order."""
    return msgspec.json.encode(result).decode()
