"""The situation at a decision, read off the visible conversation alone."""

import dataclasses
import json
import re

from actionopd_jax.environments.service_desk import acts, policy
from actionopd_jax.environments.service_desk.world import INFO, ITEMS, TOPICS
from actionopd_jax.records import ChatMessage, JsonObject, State, ToolCall

_KINDS = (
    ("where", re.compile(r"which address")),
    ("days", re.compile(r"how many days|^when was|[.!] when was")),
    ("price", re.compile(r"did i pay|price")),
    ("status", re.compile(r"status|where is")),
    ("safety", re.compile(r"fire|smoke")),
    ("fraud", re.compile(r"did not order|someone else")),
    ("cancel", re.compile(r"cancel")),
    ("refund", re.compile(r"refund")),
    ("exchange", re.compile(r"exchange")),
    ("credit", re.compile(r"credit")),
    ("address", re.compile(r"address")),
    ("email", re.compile(r"change my email")),
)
_REASON = (
    ("damaged", re.compile(r"it is damaged|came damaged")),
    ("wrong item", re.compile(r"wrong item")),
    ("unwanted", re.compile(r"do not (want|like) it")),
)
_NEW_EMAIL = re.compile(rf"(?:new email is|please use) ({acts.EMAIL.pattern})")
_OWN_ITEM = re.compile(rf"\b(?:my|the) ({'|'.join(ITEMS)})\b")
_NEW_ITEM = re.compile(rf"\ba ({'|'.join(ITEMS)})\b")
_NEXT = re.compile(r"\balso, ")
_DECLINE = re.compile(r"changed my mind|leave it")


@dataclasses.dataclass
class Wish:
    """The request under way, as far as the customer has told it."""

    kind: str = ""
    topic: str = ""  # of an escalation or a question
    item: str = ""
    order_id: str = ""
    detail: str = ""
    agreed: bool = False
    declined: bool = False
    carried_out: bool = False
    taken: bool = False  # the new email belongs to somebody else


@dataclasses.dataclass
class Situation:
    """What is known. `orders`: results of get_order by number; `numbers`: order numbers by item."""

    wish: Wish = dataclasses.field(default_factory=Wish)
    email: str = ""
    tier: str = ""
    found: bool = False  # the customer was looked up by the email told
    orders: dict[str, JsonObject] = dataclasses.field(default_factory=dict)
    numbers: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def order_id(self) -> str:
        """The number of the order that the wish is about; "" while unknown."""
        return self.wish.order_id or self.numbers.get(self.wish.item, "")

    @property
    def order(self) -> JsonObject | None:
        """What get_order said about it."""
        return self.orders.get(self.order_id)


def read(state: State) -> Situation:
    """The situation that the visible messages of a state describe; never fails on strange ones."""
    situation = Situation()
    said = ""  # the agent's last message
    calls: list[ToolCall] = []
    for message in state.messages:
        if message.role == "user":
            _hear(situation, message.content.lower(), said)
        elif message.role == "assistant":
            said = "" if message.tool_calls else message.content
            calls = list(message.tool_calls)
        elif message.role == "tool" and calls:
            _learn(situation, calls.pop(0), message)
    return situation


def _hear(situation: Situation, line: str, said: str) -> None:
    if _NEXT.search(line):
        situation.wish = Wish()
    wish = situation.wish
    _note_request(wish, line)
    orders = acts.ORDER.findall(line)
    if orders:
        wish.order_id = orders[-1].upper()
        if wish.item:
            situation.numbers[wish.item] = wish.order_id
    new_email = _NEW_EMAIL.search(line)
    for email in acts.EMAIL.findall(line):
        if new_email is not None and email == new_email.group(1):
            wish.detail = email
        elif email != situation.email:
            situation.email, situation.found = email, False
    if wish.kind == "refund":
        wish.detail = next((reason for reason, pattern in _REASON if pattern.search(line)), wish.detail)
    elif wish.kind == "address" and (address := acts.ADDRESS.search(line)):
        wish.detail = address.group(0).title()
    elif wish.kind == "exchange" and (item := _NEW_ITEM.search(line)):
        wish.detail = item.group(1)
    if said and acts.read(said).kind == "confirm":
        if _DECLINE.search(line):
            wish.declined = True
        elif line.startswith("yes"):
            wish.agreed = True


def _note_request(wish: Wish, line: str) -> None:
    if wish.kind:
        return
    name = next((name for name, pattern in _KINDS if pattern.search(line)), "")
    if name in TOPICS:
        wish.kind, wish.topic = "escalate", name
    elif name in INFO:
        wish.kind, wish.topic = "info", name
    else:
        wish.kind = name
    item = _OWN_ITEM.search(line)
    if item and name != "email":
        wish.item = item.group(1)


def _learn(situation: Situation, call: ToolCall, message: ChatMessage) -> None:
    try:
        result = json.loads(message.content)
    except ValueError:
        return
    if not isinstance(result, dict):
        return
    order_id = str(call.arguments.get("order_id", "")).strip().upper()
    error = str(result.get("error", ""))
    if error.startswith("order is ") and order_id in situation.orders:
        situation.orders[order_id]["status"] = error.removeprefix("order is ")
    if error:
        if call.name == "find_customer" and str(call.arguments.get("email", "")).strip().lower() == situation.email:
            situation.found = True  # looked up in vain: the order number is left to ask
        situation.wish.taken |= error == "email is taken"
        if error == "order has a credit" and order_id == situation.order_id:
            situation.wish.carried_out = True
        return
    if call.name == "find_customer":
        if str(call.arguments.get("email", "")).strip().lower() == situation.email:
            situation.found, situation.tier = True, str(result.get("tier", ""))
            situation.numbers.update({order["item"]: order["order_id"] for order in result.get("orders", [])})
    elif call.name == "get_order":
        situation.orders[order_id] = result
    else:
        _note_change(situation, call, order_id, result)


def _note_change(situation: Situation, call: ToolCall, order_id: str, result: JsonObject) -> None:
    wish = situation.wish
    if "status" in result and order_id in situation.orders:
        situation.orders[order_id]["status"] = result["status"]
    if policy.TOOL_OF.get(wish.kind) != call.name:
        return
    subject = str(call.arguments.get("email", "")).strip().lower() if wish.kind == "email" else order_id
    if subject == (situation.email if wish.kind == "email" else situation.order_id):
        wish.carried_out, wish.agreed = True, False
