"""The scripted expert: a chat model that follows the policy from whatever the conversation shows.

It sees the state and nothing else, draws among the right actions and their wordings, and errs now and
then, as an API teacher does: a plausible wrong action, or output that is no valid action.
"""

import dataclasses
import random

import msgspec

from actionopd_jax import config
from actionopd_jax.environments.service_desk import phrases, policy, situation
from actionopd_jax.environments.service_desk.situation import Situation
from actionopd_jax.errors import ConfigError
from actionopd_jax.protocols import ChatRequest
from actionopd_jax.records import ChatReply, JsonObject, RawToolCall, State, encode
from actionopd_jax.seeds import python_random

VERSION = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertSettings:
    """Rates per reply: `error_rate`, plausible wrong actions; `invalid_rate`, malformed output; `lapse_rate`,
    decisions without a thought for the policy (changes not confirmed, forbidden ones not refused), as of a novice.
    """

    error_rate: float = 0.03
    invalid_rate: float = 0.03
    lapse_rate: float = 0.0

    def __post_init__(self) -> None:
        for name, rate in dataclasses.asdict(self).items():
            if not 0 <= rate <= 1:
                raise ConfigError(f"{name} must be in [0, 1], got {rate}")

    @classmethod
    def build(cls, settings: JsonObject) -> "ExpertSettings":
        return config.build(cls, settings, "teacher.settings")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A right action at a situation: a call, or the wordings of a message; `why` is the reasoning."""

    why: str
    wordings: tuple[str, ...] = ()
    tool: str = ""
    arguments: JsonObject = dataclasses.field(default_factory=dict)


class Expert:
    """The service desk's own teacher. Implements `protocols.ChatModel`."""

    depends_on_task = False

    def __init__(self, seed: int, settings: ExpertSettings | None = None) -> None:
        self._seed = seed
        self._settings = settings or ExpertSettings()
        self.identity = f"service_desk.expert/{VERSION}/{seed}/{encode(self._settings).decode()}"

    async def complete(self, request: ChatRequest) -> ChatReply:
        return self.reply(request.state, request.draw)

    def reply(self, state: State, draw: tuple[int, int] = (0, 0)) -> ChatReply:
        """The turn at a state: the same state, draw and seed give the same turn."""
        rng = python_random("service_desk.expert", self._seed, state.key, *draw)
        seen = situation.read(state)
        lapse = self._settings.lapse_rate > 0 and rng.random() < self._settings.lapse_rate
        choice = rng.choice(choices(seen, heeds_policy=not lapse))
        luck = rng.random()
        if luck < self._settings.error_rate:
            choice = _slip(choice, seen, rng)
        reply = _render(choice, rng)
        if luck >= 1 - self._settings.invalid_rate:
            return _spoil(reply, rng)
        return reply


def choices(seen: Situation, heeds_policy: bool = True) -> list[Choice]:
    """The right actions at a situation, or those of somebody who forgot the policy; never empty."""
    wish = seen.wish
    if not wish.kind:
        return [Choice("The request is not clear, ask again.", ("How can I help you?", "What can I do for you?"))]
    if wish.carried_out:
        return [_finish(f"The {_NOUNS[wish.kind]} is done, tell the customer.", phrases.DONE[wish.kind], seen)]
    if wish.declined:
        return [_finish("The customer said no, change nothing.", phrases.NOTHING_CHANGED, seen)]
    if wish.kind == "email":
        return _email(seen, heeds_policy)
    return _identify(seen) or _serve(seen, heeds_policy)


def _identify(seen: Situation) -> list[Choice]:
    """What finds the order that the wish is about; empty once it is looked up."""
    if seen.order is not None:
        return []
    number, item = seen.order_id, seen.wish.item
    if number:
        steps = [Choice(f"The {item} is order {number}, look it up.", tool="get_order", arguments={"order_id": number})]
        if seen.email and not seen.found:
            steps.append(_find(seen))
        return steps
    if seen.email and not seen.found:
        return [_find(seen)]
    why = f"The order of the {item} is not known, ask for it."
    keys = [("order",)] if seen.email else list(phrases.ASK_IDENTITY)
    return [Choice(why, phrases.ASK_IDENTITY[key]) for key in keys]


def _find(seen: Situation) -> Choice:
    return Choice("The email is known, look up the customer.", tool="find_customer", arguments={"email": seen.email})


def _email(seen: Situation, heeds_policy: bool) -> list[Choice]:
    if not seen.email:
        return [Choice("The customer is not known, ask for the email.", phrases.ASK_IDENTITY[("email",)])]
    if not seen.found:
        return [_find(seen)]
    if seen.wish.taken:
        return [_finish("The new email is taken, refuse.", phrases.REFUSE["email"], seen, why="it is not free")]
    return _change(seen, "The customer is found", heeds_policy)


def _serve(seen: Situation, heeds_policy: bool) -> list[Choice]:
    wish, order, number = seen.wish, seen.order or {}, seen.order_id
    if wish.kind == "info":
        why = f"Order {number} is looked up, tell the {_ASKED[wish.topic]}."
        return [_finish(why, phrases.INFORM[wish.topic], seen)]
    status, days, tier = str(order.get("status")), int(order.get("days", 0)), str(order.get("tier"))
    state = f"Order {number} is {status}, {days} days, {tier}"
    obstacle = policy.obstacle(wish.kind, status, days, tier)
    if obstacle and heeds_policy:
        limit = 10 if wish.kind == "credit" else policy.return_limit(tier)
        cause = phrases.WHY[obstacle].format(status=status, days=days, limit=limit)
        why = f"{state}: {_NOUNS[wish.kind]} not allowed, refuse."
        return [_finish(why, phrases.REFUSE[wish.kind], seen, why=cause)]
    return _change(seen, state, heeds_policy)


_ASKED = {"status": "status", "price": "price", "where": "address", "days": "days"}
_NOUNS = {
    "cancel": "cancellation",
    "address": "address change",
    "refund": "refund",
    "exchange": "exchange",
    "credit": "credit",
    "email": "email change",
    "escalate": "escalation",
}


def _change(seen: Situation, state: str, heeds_policy: bool) -> list[Choice]:
    """The next step of a change that seems allowed: its detail, the customer's yes, the call."""
    wish, number = seen.wish, seen.order_id
    allowed = f"{state}: {_NOUNS[wish.kind]} allowed"
    if wish.kind in policy.DETAIL_OF and not wish.detail:
        detail = policy.DETAIL_OF[wish.kind].replace("_", " ")
        return [Choice(f"{allowed}, ask the {detail}.", phrases.ASK_DETAIL[wish.kind])]
    if wish.kind in policy.IRREVERSIBLE and not wish.agreed and heeds_policy:
        wordings = tuple(line.format(order=number, detail=wish.detail) for line in phrases.CONFIRM[wish.kind])
        return [Choice(f"{allowed}, get a yes.", wordings)]
    arguments: JsonObject = {"order_id": number}
    if wish.kind == "email":
        arguments = {"email": seen.email, "new_email": wish.detail}
    elif wish.kind == "escalate":
        arguments["topic"] = wish.topic
    elif wish.kind == "credit":
        arguments["amount"] = policy.credit_amount(str((seen.order or {}).get("tier")))
    elif wish.kind in policy.DETAIL_OF:
        arguments[policy.DETAIL_OF[wish.kind]] = wish.detail
    why = f"The customer said yes to the {_NOUNS[wish.kind]}, do it." if wish.agreed else f"{allowed}, do it."
    return [Choice(why, tool=policy.TOOL_OF[wish.kind], arguments=arguments)]


def _finish(reasoning: str, wordings: tuple[str, ...], seen: Situation, **facts: object) -> Choice:
    known = {key: value for key, value in (seen.order or {}).items() if key != "why"}
    known.update(facts, order=seen.order_id)
    lines = tuple(line.format(**known) + more for line in wordings for more in phrases.MORE)
    return Choice(reasoning, lines)


def _json(arguments: JsonObject) -> str:
    """Compact JSON in the order of the tool's parameters."""
    return msgspec.json.encode(arguments).decode()


def _render(choice: Choice, rng: random.Random) -> ChatReply:
    if choice.tool:
        return ChatReply("", (RawToolCall(choice.tool, _json(choice.arguments)),), choice.why)
    return ChatReply(rng.choice(choice.wordings), (), choice.why)


def _slip(choice: Choice, seen: Situation, rng: random.Random) -> Choice:
    """A plausible wrong action: a mistyped argument, a step too early, a needless question, a wrong refusal."""
    slips: list[Choice] = [
        Choice(choice.why, phrases.ASK_IDENTITY[("email",)]),
        Choice(choice.why, ("Done. Anything else?",)),
    ]
    if choice.tool and "order_id" in choice.arguments:
        number = str(choice.arguments["order_id"])
        place = rng.randrange(1, len(number)) if len(number) > 1 else 0
        typo = number[:place] + rng.choice("0123456789") + number[place + 1 :]
        slips.append(dataclasses.replace(choice, arguments=choice.arguments | {"order_id": typo}))
    if seen.order is not None and seen.wish.kind in phrases.REFUSE:
        cause = phrases.WHY["status"].format(status=seen.order.get("status"))
        slips.append(_finish(choice.why, phrases.REFUSE[seen.wish.kind], seen, why=cause))
        if seen.wish.kind == "cancel":
            slips.append(Choice(choice.why, tool="cancel_order", arguments={"order_id": seen.order_id}))
    return rng.choice(slips)


def _spoil(reply: ChatReply, rng: random.Random) -> ChatReply:
    """The reply as output that is no valid action."""
    if not reply.tool_calls:
        return _with_call(reply, RawToolCall("send_message", _json({"text": reply.content})))
    call = reply.tool_calls[0]
    broken = rng.choice(
        (
            RawToolCall(call.name, call.arguments[:-1]),
            RawToolCall(call.name, "{}"),
            RawToolCall(f"{call.name}_tool", call.arguments),
        )
    )
    return _with_call(reply, broken)


def _with_call(reply: ChatReply, call: RawToolCall) -> ChatReply:
    return ChatReply("", (call,), reply.reasoning)
