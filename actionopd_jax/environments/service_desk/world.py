"""The shop's database and the seeded generation of task instances.

A task id determines its instance: a few customers with their orders, and one customer's requests.
The splits share no customer name, no order number and no instance: both are dealt out by residue.
"""

import dataclasses
import functools
import random
import sqlite3

from actionopd_jax.environments.service_desk import policy, tools
from actionopd_jax.records import JsonObject, ToolCall
from actionopd_jax.seeds import python_random

# fmt: off
FIRST = (
    "mia", "leo", "anna", "noah", "emma", "liam", "sara", "omar", "ivan", "lucy", "nina", "paul", "rosa", "hugo",
    "tara", "alex",
)
LAST = (
    "lopez", "smith", "brown", "chen", "silva", "novak", "khan", "rossi", "meyer", "jones", "moreau", "kim", "diaz",
    "olsen",
)
ITEMS = (
    "lamp", "mug", "kettle", "desk", "chair", "phone", "watch", "bag", "shirt", "jacket", "book", "clock", "tent",
    "bike", "radio", "camera",
)
STREETS = (
    "Oak Street", "Lake Road", "Mill Lane", "Park Street", "Hill Road", "River Lane", "Church Street",
    "Station Road", "Garden Lane", "Market Street",
)
# fmt: on
REASONS = ("damaged", "wrong item", "unwanted")
TOPICS = ("safety", "fraud")
INFO = ("status", "price", "where", "days")
_RESIDUE = 8  # one name pair in 8 and one order number in 8 belong to the held-out split

SCHEMA = """
CREATE TABLE customers (email TEXT PRIMARY KEY, name TEXT, tier TEXT);
CREATE TABLE orders (order_id TEXT PRIMARY KEY, email TEXT, item TEXT, price INTEGER, status TEXT, days INTEGER,
                     address TEXT, reason TEXT DEFAULT '', credit INTEGER DEFAULT 0);
CREATE TABLE tickets (order_id TEXT, topic TEXT, PRIMARY KEY (order_id, topic));
"""


@dataclasses.dataclass(frozen=True)
class Person:
    email: str
    name: str
    tier: str


@dataclasses.dataclass(frozen=True)
class Order:
    order_id: str
    email: str
    item: str
    price: int
    status: str
    days: int  # since the status was reached
    address: str


@dataclasses.dataclass(frozen=True)
class Request:
    """One thing that the customer wants.

    `kind`: a change of `policy.CHANGES`, or "info". `detail`: the new address, item or email, the reason
    of a refund, the topic of an escalation, the question of an info request. `outcome`: what the policy
    and the customer's mind make of it. `obstacle`: see `policy.obstacle`.
    """

    kind: str
    order: Order
    tier: str
    detail: str
    outcome: str  # "change" | "refuse" | "decline" | "inform"
    obstacle: str = ""

    @property
    def gold_call(self) -> ToolCall | None:
        """The call that carries out an allowed request."""
        if self.outcome != "change":
            return None
        arguments: JsonObject = {"order_id": self.order.order_id}
        if self.kind == "email":
            arguments = {"email": self.order.email, "new_email": self.detail}
        elif self.kind == "credit":
            arguments["amount"] = policy.credit_amount(self.tier)
        elif self.kind == "escalate":
            arguments["topic"] = self.detail
        elif self.kind in policy.DETAIL_OF:
            arguments[policy.DETAIL_OF[self.kind]] = self.detail
        return ToolCall(policy.TOOL_OF[self.kind], arguments)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """An instance: the start of the database and the customer's side of the conversation."""

    seed: int
    people: tuple[Person, ...]
    orders: tuple[Order, ...]
    customer: Person
    requests: tuple[Request, ...]
    knows_order: bool  # else the customer can only give the email
    opens_with: str  # what the first line gives away: "", "email" or "order"
    gives_detail: bool  # whether requests come with their detail

    def database(self) -> sqlite3.Connection:
        """A new in-memory database at the start state."""
        db = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        db.executescript(SCHEMA)
        db.executemany("INSERT INTO customers VALUES (?, ?, ?)", [tuple(vars(p).values()) for p in self.people])
        db.executemany(
            "INSERT INTO orders (order_id, email, item, price, status, days, address) VALUES (?, ?, ?, ?, ?, ?, ?)",
            [tuple(vars(order).values()) for order in self.orders],
        )
        return db

    @functools.cached_property
    def goal(self) -> tuple[tuple[object, ...], ...]:
        """The rows of the database after the gold plan."""
        db = self.database()
        for request in self.requests:
            if request.gold_call is not None:
                tools.execute(db, request.gold_call)
        rows = snapshot(db)
        db.close()
        return rows


def snapshot(db: sqlite3.Connection) -> tuple[tuple[object, ...], ...]:
    """All rows of all tables, in a fixed order."""
    rows: list[tuple[object, ...]] = []
    for table in ("customers", "orders", "tickets"):
        rows.extend((table, *row) for row in db.execute(f"SELECT * FROM {table} ORDER BY 1, 2"))
    return tuple(rows)


def scenario(split: str, index: int, seed: int) -> Scenario:
    """The instance number `index` of a split: the first drawn that takes 4 to 8 decisions when done right."""
    rng = python_random("service_desk", seed, split, index)
    while True:
        drawn = _draw(rng, held_out=split == "heldout")
        if 4 <= right_decisions(drawn) <= 8:
            return drawn


def right_decisions(drawn: Scenario) -> int:
    """How many decisions the shortest right course takes."""
    first = drawn.requests[0]
    count = 0 if drawn.opens_with == "order" or (drawn.opens_with and not drawn.knows_order) else 1
    if first.kind == "email":
        count = 0 if drawn.opens_with == "email" else 1
    if first.kind == "email" or not drawn.knows_order:
        count += 1  # find_customer
    seen = set()
    for request in drawn.requests:
        if request.kind != "email" and request.order.order_id not in seen:
            seen.add(request.order.order_id)
            count += 1  # get_order
        asks = request.kind in policy.DETAIL_OF and not drawn.gives_detail and request.outcome in ("change", "decline")
        confirms = request.kind in policy.IRREVERSIBLE and request.outcome in ("change", "decline")
        count += asks + confirms + (request.outcome == "change") + 1
    return count


def _draw(rng: random.Random, held_out: bool) -> Scenario:
    people = _people(rng, held_out)
    orders: list[Order] = []
    for person in people:
        for item in rng.sample(ITEMS, rng.choice((1, 1, 1, 2))):
            orders.append(_order(rng, person, item, held_out, {order.order_id for order in orders}))
    customer = people[0]
    own = [order for order in orders if order.email == customer.email]
    rng.shuffle(people)
    rng.shuffle(orders)
    requests = [_request(rng, rng.choice(own), customer)]
    if rng.random() < 0.4 and requests[0].kind != "email":
        second = _request(rng, rng.choice(own), customer)
        if second.kind in ("info", "credit", "escalate") or second.outcome == "refuse":
            touched = second.order.order_id == requests[0].order.order_id and requests[0].outcome == "change"
            if not touched:  # the second request is about the start state
                requests.append(second)
    knows_order = rng.random() < 0.4
    opens_with = rng.choice(("", "email", "order" if knows_order else "email", ""))
    return Scenario(
        seed=rng.getrandbits(62),
        people=tuple(people),
        orders=tuple(orders),
        customer=customer,
        requests=tuple(requests),
        knows_order=knows_order,
        opens_with="" if requests[0].kind == "email" and opens_with == "order" else opens_with,
        gives_detail=len(requests) > 1 or rng.random() < 0.5,
    )


def _name(rng: random.Random, held_out: bool) -> tuple[str, str]:
    while True:
        first, last = rng.randrange(len(FIRST)), rng.randrange(len(LAST))
        if ((first + last) % _RESIDUE == 0) == held_out:
            return FIRST[first], LAST[last]


def _people(rng: random.Random, held_out: bool) -> list[Person]:
    names = list(dict.fromkeys(_name(rng, held_out) for _ in range(3)))
    return [Person(f"{a}.{b}@mail.com", f"{a} {b}".title(), rng.choice(("basic", "gold"))) for a, b in names]


def _order(rng: random.Random, person: Person, item: str, held_out: bool, taken: set[str]) -> Order:
    while True:
        number = rng.randrange(1000, 10000)
        if (number % _RESIDUE == 0) == held_out and f"W{number}" not in taken:
            break
    status = rng.choice(("processing", "shipped", "delivered", "delivered"))
    days = rng.randint(2, 90) if status == "delivered" else rng.randint(2, 25)
    return Order(f"W{number}", person.email, item, rng.randint(5, 99), status, days, _address(rng))


def _address(rng: random.Random) -> str:
    return f"{rng.randint(1, 99)} {rng.choice(STREETS)}"


def _request(rng: random.Random, order: Order, customer: Person) -> Request:
    while True:
        drawn = _any_request(rng, order, customer)
        if drawn.outcome != "refuse" or rng.random() < 0.35:  # most refusals are drawn again, to balance the outcomes
            return drawn


def _any_request(rng: random.Random, order: Order, customer: Person) -> Request:
    kind = rng.choice(("cancel", "address", "refund", "exchange", "credit", "email", "escalate", "info", "cancel", "refund"))
    if kind == "info":
        topics = INFO[:-1] if order.status == "processing" else INFO
        return Request(kind, order, customer.tier, rng.choice(topics), "inform")
    detail = {
        "address": _address(rng),
        "refund": rng.choice(REASONS),
        "exchange": rng.choice([item for item in ITEMS if item != order.item]),
        "email": f"{customer.email.split('@')[0]}@post.com",
        "escalate": rng.choice(TOPICS),
    }.get(kind, "")
    obstacle = policy.obstacle(kind, order.status, order.days, customer.tier)
    outcome = "refuse" if obstacle else "change"
    if outcome == "change" and kind in policy.IRREVERSIBLE and rng.random() < 0.2:
        outcome = "decline"
    return Request(kind, order, customer.tier, detail, outcome, obstacle)
