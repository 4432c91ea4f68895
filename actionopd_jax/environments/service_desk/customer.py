"""The scripted customer: opens with a request, tells facts when asked, says yes or no, leaves when served.

A function of the instance and of what the agent says; the wording is drawn from the instance's seed.
"""

from actionopd_jax.environments.service_desk import acts, phrases, policy
from actionopd_jax.environments.service_desk.acts import Act
from actionopd_jax.environments.service_desk.world import Request, Scenario
from actionopd_jax.records import ToolCall
from actionopd_jax.seeds import python_random

PATIENCE = 3
"""Useless messages after which the customer leaves."""


class Customer:
    """One customer in one conversation.

    Attributes:
        position: number of requests that were answered.
        told: per answered request, whether the answer said what it had to say.
        consent: the change that the customer said yes to and that was not carried out yet.
        useless: useless messages heard so far.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._rng = python_random(scenario.seed, "customer")
        self._revealed: set[str] = set()
        self._declined = False
        self._carried_out = False
        self.position = 0
        self.told: list[bool] = []
        self.consent: tuple[str, str] | None = None
        self.useless = 0

    @property
    def request(self) -> Request | None:
        requests = self._scenario.requests
        return requests[self.position] if self.position < len(requests) else None

    @property
    def satisfied(self) -> bool:
        """All requests were answered, whatever the answers were worth."""
        return self.request is None

    def opening(self) -> str:
        """The first line."""
        line = self._pick(phrases.GREETINGS) + self._present(self._scenario.requests[0])
        if self._scenario.opens_with == "email":
            line += " " + self._tell_email()
        elif self._scenario.opens_with == "order":
            line += " " + self._tell_order()
        return line

    def notice(self, call: ToolCall) -> bool:
        """Takes note of a change that was carried out; returns whether the customer had agreed to it (or need not)."""
        kinds = {tool: kind for kind, tool in policy.TOOL_OF.items()}
        kind, subject = kinds[call.name], _subject(call)
        agreed = kind not in policy.IRREVERSIBLE or self.consent == (kind, subject)
        if agreed:
            self.consent = None
        request = self.request
        if request is not None and (kind, subject) == _goal(request):
            self._carried_out = True
        return agreed

    def hear(self, text: str) -> str | None:
        """The answer to a message; None when the customer leaves."""
        request = self.request
        if request is None:
            return None
        act = acts.read(text)
        if act.kind == "confirm":
            return self._answer_proposal(request, act)
        if act.kind == "ask":
            return self._answer_question(request, act)
        if self._is_answer(request, act):
            return self._advance(_says_enough(request, act, self._declined))
        if act.kind in ("done", "close", "inform"):
            return self._complain(phrases.NOT_DONE, request)
        return self._complain(phrases.CONFUSED, request)

    def _is_answer(self, request: Request, act: Act) -> bool:
        if act.kind == "refuse":
            return True
        if request.kind == "info":
            return act.kind == "inform" and _says_enough(request, act, declined=False)
        return act.kind in ("done", "close") and (self._carried_out or self._declined)

    def _answer_proposal(self, request: Request, act: Act) -> str | None:
        about = _orders(act) <= {request.order.order_id}
        details = request.kind not in ("address", "exchange", "email") or request.detail.lower() in act.facts
        if request.kind not in act.topics or len(act.topics) > 1 or act.negated or not about or not details:
            return self._complain(phrases.WRONG, request)
        if self.consent is not None or self._declined:
            self.useless += 1
            if self.useless >= PATIENCE:
                return None
        if request.outcome == "decline":
            self._declined = True
            return self._pick(phrases.DECLINE)
        self.consent = _goal(request)
        return self._pick(phrases.YES)

    def _answer_question(self, request: Request, act: Act) -> str | None:
        asked = act.topics
        detail = policy.DETAIL_OF.get(request.kind)
        fact = detail if detail in asked else "order" if "order" in asked else "email" if "email" in asked else ""
        if "order" in asked and "email" in asked and (not self._scenario.knows_order or self._rng.random() < 0.5):
            fact = "email"
        if not fact:
            return self._complain(phrases.CONFUSED, request)
        if fact in self._revealed:
            self.useless += 1
            if self.useless >= PATIENCE:
                return None
        self._revealed.add(fact)
        if fact == detail:
            return self._tell_detail(request)
        if fact == "email":
            return self._tell_email()
        return self._tell_order() if self._scenario.knows_order else self._tell_email(phrases.NO_ORDER)

    def _advance(self, told: bool) -> str | None:
        self.told.append(told)
        self.position += 1
        self.consent, self._declined, self._carried_out = None, False, False
        self._revealed -= set(policy.DETAIL_OF.values()) | {"order"}
        request = self.request
        if request is None:
            return None
        line = self._pick(phrases.NEXT) + self._present(request)
        return f"{line} {self._tell_order()}" if self._scenario.knows_order and request.kind != "email" else line

    def _complain(self, wordings: tuple[str, ...], request: Request) -> str | None:
        self.useless += 1
        return None if self.useless >= PATIENCE else self._pick(wordings) + self._present(request)

    def _present(self, request: Request) -> str:
        key = request.detail if request.kind in ("info", "escalate") else request.kind
        line = self._pick(phrases.OPENINGS[key]).format(item=request.order.item, status=request.order.status)
        if self._scenario.gives_detail and request.kind in policy.DETAIL_OF:
            line += " " + self._tell_detail(request)
        return line

    def _tell_detail(self, request: Request) -> str:
        self._revealed.add(policy.DETAIL_OF[request.kind])
        wordings = phrases.DETAILS[request.detail if request.kind == "refund" else request.kind]
        return self._pick(wordings).format(detail=request.detail)

    def _tell_email(self, wordings: tuple[str, ...] = phrases.OWN_EMAIL) -> str:
        self._revealed.add("email")
        return self._pick(wordings).format(email=self._scenario.customer.email)

    def _tell_order(self) -> str:
        request = self.request
        self._revealed.add("order")
        return self._pick(phrases.OWN_ORDER).format(order=request.order.order_id if request else "")

    def _pick(self, wordings: tuple[str, ...]) -> str:
        return self._rng.choice(wordings)


def _subject(call: ToolCall) -> str:
    if call.name == "update_email":
        return str(call.arguments["email"]).strip().lower()
    return str(call.arguments["order_id"]).strip().upper()


def _goal(request: Request) -> tuple[str, str]:
    return request.kind, request.order.email if request.kind == "email" else request.order.order_id


def _says_enough(request: Request, act: Act, declined: bool) -> bool:
    """Whether an answer says what the request's outcome demands, and of no other order or change."""
    order = request.order
    if not _orders(act) <= {order.order_id}:
        return False
    if request.outcome == "change":
        return act.kind == "close" or (
            act.kind == "done" and not act.negated and (not act.topics or request.kind in act.topics)
        )
    if request.outcome == "decline":
        return declined and act.kind == "close"
    if request.outcome == "inform":
        asked = {"status": order.status, "price": str(order.price), "where": order.address.lower(), "days": str(order.days)}
        return act.kind == "inform" and not act.negated and asked[request.detail] in act.facts
    limit = 10 if request.kind == "credit" else policy.return_limit(request.tier)
    reasons = {order.status} if request.obstacle == "status" else {str(order.days), str(limit)}
    return act.kind == "refuse" and request.kind in act.topics and bool(reasons & act.facts)


def _orders(act: Act) -> set[str]:
    return {fact for fact in act.facts if acts.ORDER.fullmatch(fact)}
