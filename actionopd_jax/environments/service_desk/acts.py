"""What an agent's message does, recognised from its text whatever the exact wording.

The customer reacts to the act, the score checks it, the expert reads its own history by it and the
judge compares acts: one reading for all.
"""

import dataclasses
import functools
import re

from actionopd_jax.environments.service_desk.world import ITEMS, STREETS

ORDER = re.compile(r"\bw\d{4}\b", re.IGNORECASE)
EMAIL = re.compile(r"[\w.+-]+@\w+(?:\.\w+)+")
ADDRESS = re.compile(rf"\b\d+ (?:{'|'.join(STREETS)})\b", re.IGNORECASE)
STATUSES = ("processing", "shipped", "delivered", "cancelled", "refunded", "exchanged")

_CONFIRM = re.compile(
    r"\b(shall|should|may|can) i (cancel|refund|exchange|swap|change|update|set|go|do|proceed)\b"
    r"|\b(do|would) you (want|like)( me)? to\b|\bconfirm\b|\bis (that|this) (right|ok|okay|correct)\b"
    r"|\b(ok|okay|fine) (to|if i)\b|\byes or no\b|\bgo ahead\?"
)
_REFUSE = re.compile(r"\b(can ?not|can't|could not|unable|not possible|not allowed|may not|refuse|impossible)\b")
_CLOSE = re.compile(r"\b(anything|something) else\b|\bgoodbye\b|\bbye\b|\bnice day\b|\bmore i can\b|\bwelcome\b")
_OFFER = re.compile(r"\b(how (can|may) i help|what can i do)\b")
_ASK = re.compile(r"\?|\b(please|tell|send|give|need|what|which|why)\b")
_CHANGES = {
    "cancel": re.compile(r"\bcancel"),
    "refund": re.compile(r"\brefund"),
    "exchange": re.compile(r"\b(exchang|swap)"),
    "address": re.compile(r"(?<!mail )\baddress"),
    "credit": re.compile(r"\bcredit"),
    "email": re.compile(r"\be-?mail"),
    "escalate": re.compile(r"\b(escalat|colleague|safety|fraud)"),
}
_NOUNS = {
    "new_email": re.compile(r"\bnew e-?mail"),
    "email": re.compile(r"(?<!new )\be-?mail"),
    "order": re.compile(r"\border (number|id)\b|\bnumber of (the|your) order\b|\bwhich order\b"),
    "address": re.compile(r"(?<!mail )\baddress"),
    "item": re.compile(r"\b(new|other|another|which|what) item\b|\binstead\b"),
    "reason": re.compile(r"\breason\b|\bwhy\b|\bwrong with\b"),
}
_DONE = re.compile(r"\b(done|cancelled|refunded|exchanged|changed|updated|given|added|applied|escalated|passed)\b")
_NEGATION = re.compile(r"\b(not|no|never|nothing|cannot|can't|won't|isn't)\b|n't\b")
_REASONS = {"damaged": r"\b(damaged|broken)\b", "wrong item": r"\bwrong item\b", "unwanted": r"\b(unwanted|not wanted)\b"}


@dataclasses.dataclass(frozen=True)
class Act:
    """A message's act.

    `kind`: "confirm" (asks for a yes to a change), "refuse", "ask", "done" (reports a change), "inform",
    "close", "offer" (how can I help) or "other". `topics`: the changes or, for "ask", the facts asked
    for. `facts`: order numbers, emails, addresses, items, status words, refund reasons and numbers.
    """

    kind: str
    topics: frozenset[str]
    facts: frozenset[str]
    negated: bool


@functools.lru_cache(maxsize=8192)
def read(text: str) -> Act:
    """The act of a message."""
    lowered = " ".join(text.lower().replace("’", "'").split())
    facts = _facts(lowered)
    bare = ADDRESS.sub(" ", EMAIL.sub(" ", lowered))
    kind, topics = _classify(bare, facts)
    return Act(kind, topics, facts, bool(_NEGATION.search(bare.replace("yes or no", ""))))


def _classify(bare: str, facts: frozenset[str]) -> tuple[str, frozenset[str]]:
    """Kind and topics; the first reading that fits, from the most to the least committing."""
    changes = frozenset(name for name, pattern in _CHANGES.items() if pattern.search(bare))
    nouns = frozenset(name for name, pattern in _NOUNS.items() if pattern.search(bare))
    none: frozenset[str] = frozenset()
    proposes = changes and _CONFIRM.search(bare) and (facts or not nouns & {"order", "email", "address"})
    reports = _DONE.search(bare) and not _reports_status(bare)
    tells = facts & set(STATUSES) or "dollars" in bare or any(ADDRESS.fullmatch(fact) for fact in facts)
    readings = (
        (_REFUSE.search(bare), "refuse", changes),
        (proposes, "confirm", changes),
        (reports and "nothing" in bare, "close", none),
        (reports, "done", changes),
        (tells, "inform", none),
        (nouns and _ASK.search(bare), "ask", nouns),
        (_CLOSE.search(bare), "close", none),
        (_OFFER.search(bare), "offer", none),
    )
    return next(((kind, topics) for fits, kind, topics in readings if fits), ("other", none))


def _reports_status(bare: str) -> bool:
    return bool(re.search(r"\b(shipped|delivered|processing)\b", bare)) and "done" not in bare


def _facts(lowered: str) -> frozenset[str]:
    facts = {match.upper() for match in ORDER.findall(lowered)}
    rest = ORDER.sub(" ", lowered)
    facts.update(EMAIL.findall(rest))
    rest = EMAIL.sub(" ", rest)
    facts.update(ADDRESS.findall(rest))
    rest = ADDRESS.sub(" ", rest)
    facts.update(name for name, pattern in _REASONS.items() if re.search(pattern, rest))
    words = re.findall(r"[a-z]+|\d+", rest)
    facts.update(word for word in words if word in _WORDS or word.isdigit())
    return frozenset(facts)


_WORDS = frozenset(STATUSES) | frozenset(ITEMS)
